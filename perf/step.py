"""One training step against its bare matrix products, on one core. Prints a table of ratios.

The bare products of a step are, for each layer, two forward, two for the weight gradients and two for the input
gradients (none for the first layer). Each number is the median over rounds in which all three are timed in turn, so
that a busy machine slows them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch

import evcl
from evcl.methods import METHODS
from evcl.randomness import GeneratorNoise, generator
from evcl.settings import resolve, stack
from evcl.training import Pool, Run, Step, TaskData

BATCH = 256
NETWORKS = {"split-mnist": ([256, 256], 2), "permuted-mnist": ([100, 100], 10)}


def bare_products(widths: list[int]) -> Callable[[], None]:
    """The products of one step and nothing else, into buffers that are there already."""
    products: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for layer, (i, o) in enumerate(pairwise(widths)):
        x, weight, delta = torch.randn(BATCH, i), torch.randn(o, i), torch.randn(BATCH, o)
        once = [(x, weight.mT, torch.empty(BATCH, o)), (delta.mT, x, torch.empty(o, i))]
        if layer > 0:
            once.append((delta, weight, torch.empty(BATCH, i)))
        products += once * 2

    def run() -> None:
        for a, b, out in products:
            torch.mm(a, b, out=out)

    return run


def step(method: str, hidden: list[int], classes: int) -> Callable[[], object]:
    """A method's step in the middle of a second task."""
    settings = resolve(method, METHODS[method].known_settings, {"batch_size": BATCH, "epochs": 1})
    run = Run(evcl.nn.mlp(784, hidden), METHODS[method], [settings], [0], draw=True)
    source = generator(0, "perf")
    x = torch.rand(1, 4 * BATCH, 784, generator=source)
    y = torch.randint(classes, (1, 4 * BATCH), generator=source)
    head = run.add_head(hidden[-1], classes)
    task = TaskData(x, y, head)
    run.train([task])
    pool, network = Pool([task], run.classes), run.network
    memory = evcl.methods.Memory(run.prior, run.importance, run.used)
    s = stack([settings], x)
    one = Step(network, network.layout, network.posterior.snapshot(), run.method.terms(memory, s, len(pool)), s)
    rows = torch.arange(BATCH).unsqueeze(0)
    noise = GeneratorNoise([source])
    return lambda: one(pool, rows, noise)


def timed(run: Callable[[], object], repeats: int = 10) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, float32, batch {BATCH}; milliseconds a step, median of 15 rounds\n")
    print(f"{'network':<16}{'products':>10}{'evcl':>10}{'naive':>10}{'evcl/products':>16}{'evcl/naive':>12}")
    for name, (hidden, classes) in NETWORKS.items():
        runs = [bare_products([784, *hidden, classes]), step("evcl", hidden, classes), step("naive", hidden, classes)]
        for run in runs:
            timed(run)
        rounds = [[1e3 * timed(run) for run in runs] for _ in range(15)]
        products, ours, naive = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratios = f"{ours / products:>16.2f}{ours / naive:>12.2f}"
        print(f"{name:<16}{products:>10.2f}{ours:>10.2f}{naive:>10.2f}{ratios}")


if __name__ == "__main__":
    main()
