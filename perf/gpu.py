"""Milliseconds per step of R replicas on a GPU, relative to two lower bounds, and the training time of the whole paper.

The memory floor is the time of the update's memory traffic: each of its buffers read and written once (the means and
log sigmas, two moments each, the constants of the springs, the gradients and the variance). The product floor is the
time of the step's bare matrix products. Both use rates measured in the same run: those of a large copy, and of a large
product in the same precision. Steps are timed on random data, because their time does not depend on it; the paper is
trained on its own data sets.

    python perf/gpu.py --precision bf16    (or tf32, the default)
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch

import evcl
from common import paper_form
from evcl.experiments import PAPER_METHODS, configure, execute_all
from evcl.methods import METHODS
from evcl.training import Run, TaskData
from evcl.training.graphed import GraphedSteps

# hidden layers, inputs, classes, examples per task: the paper's benchmarks
SHAPES = {
    "permuted-mnist": ([100, 100], 784, 10, 60_000),
    "split-mnist": ([256, 256], 784, 2, 12_000),
    "split-notmnist": ([150] * 4, 784, 2, 2_917),
    "split-fashion-mnist": ([150] * 4, 784, 2, 12_000),
    "split-cifar10": ([150] * 4, 784, 2, 10_000),
}
PAPER = [method for method in PAPER_METHODS if method != "joint"]
BATCH, TASKS, EPOCHS = 256, 5, 100


def seconds(run: Callable[[], object], repeats: int) -> float:
    """The median of 5 timed rounds, after an untimed one."""
    found = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / repeats)
    return statistics.median(found[1:])


def rates(precision: str) -> tuple[float, float]:
    """Bytes per second of a copy (read and written), and operations per second of a product in this precision."""
    a = torch.empty(2**28, device="cuda")
    b = torch.empty_like(a)
    copy = 2 * a.numel() * 4 / seconds(lambda: b.copy_(a), 5)
    x = torch.randn(8192, 8192, device="cuda").to(torch.bfloat16 if precision == "bf16" else torch.float32)
    y = torch.empty_like(x)
    return copy, 2 * 8192**3 / seconds(lambda: torch.mm(x, x, out=y), 3)


def step_seconds(
    method: str, shape: tuple[list[int], int, int, int], replicas: int, precision: str = "tf32"
) -> tuple[float, int]:
    """A step's time in the second task, from the difference between 12 and 2 epochs, and the number of weights."""
    hidden, inputs, classes, examples = shape
    settings = [paper_form(method, batch_size=BATCH, epochs=1, lr=1e-3 * (1 + i / 100)) for i in range(replicas)]
    run = Run(
        evcl.nn.mlp(inputs, hidden),
        METHODS[method],
        settings,
        range(replicas),
        draw=True,
        device="cuda",
        precision=precision,
    )
    head = run.add_head(hidden[-1], classes)
    x = torch.rand(1, examples, inputs, device="cuda")
    y = torch.randint(classes, (1, examples), device="cuda")
    task = TaskData(x, y, head)
    run.learn([task])
    times = []
    for epochs in (2, 12):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run.learn([task], epochs)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return (times[1] - times[0]) / 10 / -(-examples // BATCH), run.network.layout.size


@contextmanager
def watched() -> Iterator[dict[str, list[tuple[float, float]]]]:
    """Start and end times of epochs and captures in all programs; a capture is part of an epoch."""
    found: dict[str, list[tuple[float, float]]] = {"epoch": [], "_capture": []}

    def timed(name: str) -> Any:
        plain = getattr(GraphedSteps, name)

        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = plain(*args)
            torch.cuda.current_stream().synchronize()  # as the end of an epoch does
            found[name].append((start, time.perf_counter()))
            return result

        return patch.object(GraphedSteps, name, call)

    with timed("epoch"), timed("_capture"):
        yield found


def paper(precision: str) -> None:
    """Train the whole paper with the library: eight methods, five benchmarks, five seeds, 100 epochs, on real data."""
    configs = [
        configure(name, method, "paper", range(5), device="cuda", given={"epochs": EPOCHS}, precision=precision)
        for name in SHAPES
        for method in PAPER
    ]
    start = time.perf_counter()
    seconds = {}
    with watched() as times:
        for i, result in execute_all(configs, lambda i, event: None):
            name, method = configs[i].benchmark, configs[i].method
            seconds[name, method] = result.seconds
    whole = time.perf_counter() - start
    print(f"\nthe whole paper, evaluation included: {whole:.1f} s; each program's own seconds (several run at a time):")
    print(f"{'':<22}" + "".join(f"{method.replace('-coreset', ''):>13}" for method in PAPER))
    for name in SHAPES:
        print(f"{name:<22}" + "".join(f"{seconds[name, method]:>13.1f}" for method in PAPER))
    epochs, captures = (sum(end - begin for begin, end in times[name]) for name in ("epoch", "_capture"))
    first, last = min(begin for begin, _ in times["epoch"]), max(end for _, end in times["epoch"])
    print(
        f"of the programs' own {sum(seconds.values()):.1f} s, {epochs - captures:.1f} s are training steps and "
        f"{captures:.1f} s captures (waits for others' included); from the first step to the last {last - first:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The step, and the whole paper, on a GPU.")
    parser.add_argument("--precision", choices=("tf32", "bf16"), default="tf32")
    precision = parser.parse_args().precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # applies to all threads
    copy, product = rates(precision)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {precision}, batch {BATCH}")
    print(f"copy {copy / 1e12:.2f} TB/s, product {product / 1e12:.0f} TFLOP/s\n")
    print(
        f"{'benchmark':<22}{'method':<7}{'R':>4}{'ms':>8}{'memory':>9}{'products':>9}{'step/floor':>11}{'paper s':>9}"
    )
    whole = 0.0
    for name, shape in SHAPES.items():
        hidden, inputs, classes, examples = shape
        for method, replicas, buffers, products in (("evcl", 20, 23, 2), ("ewc", 10, 10, 1)):
            step, weights = step_seconds(method, shape, replicas, precision)
            widths = list(pairwise([inputs, *hidden, classes]))
            operations = sum(2 * BATCH * i * o * (2 if k == 0 else 3) for k, (i, o) in enumerate(widths))
            copies = products / 2 if precision == "bf16" else 0  # bf16 copies of the weights
            memory = 4 * (buffers + copies) * weights * replicas / copy
            arithmetic = products * operations * replicas / product
            paper_s = step * -(-examples // BATCH) * TASKS * EPOCHS
            whole += paper_s
            floors = f"{1e3 * memory:>9.3f}{1e3 * arithmetic:>9.3f}{step / (memory + arithmetic):>11.1f}"
            print(f"{name:<22}{method:<7}{replicas:>4}{1e3 * step:>8.3f}{floors}{paper_s:>9.1f}", flush=True)
    print(f"\nall of them, one after another: {whole:.0f} s (by the steps above)")
    paper(precision)


if __name__ == "__main__":
    main()
