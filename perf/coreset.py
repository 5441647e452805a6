"""Time of k-center relative to as many products of the data with a vector: 200 centres of 60,000 examples, one core.

The data are random pixels, clusters, pixels of 0 or 1, where many examples are about equally far, and MNIST if the
cache or EVCL_DATA has it. Products and k-center are timed in turn, so that other load slows both.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from evcl import benchmarks
from evcl._core.errors import EvclError
from evcl.methods.selection import kcenter

EXAMPLES, PIXELS, CENTRES = 60_000, 784, 200


def data() -> dict[str, Callable[[], Tensor]]:
    source = torch.Generator().manual_seed(0)

    def clusters() -> Tensor:
        centres = torch.randn(50, PIXELS, generator=source).repeat(EXAMPLES // 50, 1)
        return centres + 0.1 * torch.randn(EXAMPLES, PIXELS, generator=source)

    return {
        "random": lambda: torch.rand(EXAMPLES, PIXELS, generator=source),
        "clusters": clusters,
        "0 or 1": lambda: torch.randint(2, (EXAMPLES, PIXELS), generator=source).float(),
        "MNIST": lambda: benchmarks.get("permuted-mnist", tasks=1)[0].train.x.flatten(1),
    }


def seconds(run: Callable[[Tensor], object], x: Tensor) -> float:
    start = time.perf_counter()
    run(x)
    return time.perf_counter() - start


def products(x: Tensor) -> None:
    vector = x[0].clone()
    for _ in range(CENTRES):
        torch.mv(x, vector)


def centres(x: Tensor) -> None:
    kcenter(x.unsqueeze(0), CENTRES)


def main() -> None:
    torch.set_num_threads(1)
    os.environ["EVCL_OFFLINE"] = "1"
    print(f"torch {torch.__version__}, one thread, {CENTRES} centres of {EXAMPLES:,} x {PIXELS}")
    print("seconds, median of 3 rounds\n")
    print(f"{'data':<12}{'products':>10}{'k-center':>10}{'ratio':>8}")
    for name, make in data().items():
        try:
            x = make()
        except EvclError:
            print(f"{name:<12}not here: left out")
            continue
        rounds = [[seconds(run, x) for run in (products, centres)] for _ in range(3)]
        bare, ours = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{name:<12}{bare:>10.2f}{ours:>10.2f}{ours / bare:>8.2f}")


if __name__ == "__main__":
    main()
