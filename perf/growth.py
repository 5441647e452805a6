"""How time and memory grow with tasks, width, replicas and cores. Prints one table of ratios for each.

`python perf/growth.py` measures all; arguments such as `width` choose some. Memory is read from Linux's /proc.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

import evcl
from common import BATCH, medians, paper_form
from evcl._core.randomness import generator
from evcl.curvature import Sample, fisher
from evcl.experiments import configure, cores, execute_all
from evcl.methods import METHODS
from evcl.training import Run, TaskData
from step import bare_products, step

WIDTHS, REPLICAS, MEMORY = (64, 128, 256, 512, 1024), (1, 2, 4, 8), ((256, 1), (256, 8), (1024, 1))


def start(hidden: list[int], classes: int, replicas: int = 1, epochs: int = 1) -> tuple[Run, int]:
    """A run of EVCL with one head, and the head."""
    settings = paper_form("evcl", batch_size=BATCH, epochs=epochs)
    run = Run(evcl.nn.mlp(784, hidden), METHODS["evcl"], [settings] * replicas, range(replicas), draw=True)
    return run, run.add_head(hidden[-1], classes)


def made_up(examples: int, classes: int) -> tuple[Tensor, Tensor]:
    source = generator(0, "perf")
    return torch.rand(1, examples, 784, generator=source), torch.randint(classes, (1, examples), generator=source)


def state_size(run: Run) -> float:
    """MB of the state that a run keeps between tasks: posterior, prior, importance."""
    return sum(t.numel() * t.element_size() for t in run.tensors().values()) / 2**20


def in_use(field: str) -> float:
    """MB: `VmRSS` is the current value, `VmHWM` the peak. (A process inherits `ru_maxrss` from its parent.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def tasks() -> None:
    """Time a run that repeats its second task, and one that continues from its 45th to its 50th task."""
    x, y = made_up(2_000, 10)
    (young, head), (old, _) = (start([100, 100], 10, epochs=4) for _ in range(2))

    def learn(run: Run) -> None:
        order = torch.randperm(784, generator=generator(0, "permutation", run.rounds))
        run.learn([TaskData(x[..., order], y, head)])

    learn(young)
    memory = []
    for _ in range(44):
        learn(old)
        memory.append(in_use("VmRSS"))

    def second() -> None:
        learn(young.forked(young.network.call))

    early, late = medians([second, lambda: learn(old)], 5)
    print("tasks: 784-100-100, one head, 2,000 examples, 4 epochs and the Fisher per task, median of 5 rounds\n")
    print(f"{'':<15}{'s per task':>11}{'state MB':>10}{'MB in use':>11}")
    print(f"{'task 2':<16}{early:>10.3f}{state_size(young):>10.2f}{median(memory[1:11]):>11.1f}  (tasks 2 to 11)")
    print(f"{'tasks 46 to 50':<16}{late:>10.3f}{state_size(old):>10.2f}{median(memory[-10:]):>11.1f}  (tasks 35 to 44)")
    print(f"{'ratio':<16}{late / early:>10.2f}{state_size(old) / state_size(young):>10.2f}", end="")
    print(f"{median(memory[-10:]) / median(memory[1:11]):>11.2f}")


def width() -> None:
    examples = 4 * BATCH
    x, y = made_up(examples, 2)

    def consolidation(h: int) -> Callable[[], object]:
        run, head = start([h, h], 2)
        return lambda: fisher(Sample(run.network, run.network.posterior.mean, run.network.layout, [head], x, y))

    runs: list[Callable[[], object]] = []
    for h in WIDTHS:
        runs += [bare_products([784, h, h, 2]), step("evcl", [h, h], 2), consolidation(h)]
    found = [1e3 * seconds for seconds in medians(runs, 5, 8)]
    print(
        f"width: 784-h-h, 2 classes, batch {BATCH}; milliseconds of a step and of the Fisher of {examples:,} examples,"
    )
    print("median of 5 rounds\n")
    print(
        f"{'h':>5}{'weights':>11}{'products':>10}{'step':>8}{'Fisher':>8}{'step/products':>15}{'Fisher/products':>17}"
    )
    for h, products, one, measure in zip(WIDTHS, found[::3], found[1::3], found[2::3], strict=True):
        weights = 785 * h + (h + 1) * h + (h + 1) * 2
        print(f"{h:>5}{weights:>11,}{products:>10.2f}{one:>8.2f}{measure:>8.2f}", end="")
        print(f"{one / products:>15.2f}{measure / products:>17.2f}")


def replicas() -> None:
    shapes = ([256, 256], [100, 100])
    runs = [step("evcl", hidden, 2, replicas=r) for r in REPLICAS for hidden in shapes]
    found = [1e3 * seconds for seconds in medians(runs, 5, 8)]
    each = [[ms / r for ms in found[2 * i : 2 * i + 2]] for i, r in enumerate(REPLICAS)]
    print(f"replicas: R networks in one program, 2 classes, batch {BATCH}; ms per step and replica, median of")
    print("5 rounds\n")
    print(f"{'R':>3}{'784-256-256':>14}{'/ R = 1':>9}{'784-100-100':>14}{'/ R = 1':>9}")
    for r, times in zip(REPLICAS, each, strict=True):
        print(f"{r:>3}" + "".join(f"{t:>14.2f}{t / one:>9.2f}" for t, one in zip(times, each[0], strict=True)))


def processes() -> None:
    """Time as many runs as there are cores: one after another in one process, and each in its own process."""
    configs = [configure("permuted-digits", "evcl", seeds=[seed], given={"epochs": 300}) for seed in range(cores())]

    def work(workers: int) -> Callable[[], object]:
        return lambda: list(execute_all(configs, lambda index, event: None, workers))

    one, all_ = medians([work(1), work(cores())], 2)
    print(f"cores: {cores()} runs of permuted-digits (EVCL, one seed, 300 epochs), from start to end, the start of the")
    print("processes included\n")
    print(f"{'processes':>9}{'s':>8}{'speed-up':>10}{'a core':>8}")
    for count, seconds in ((1, one), (cores(), all_)):
        print(f"{count:>9}{seconds:>8.1f}{one / seconds:>10.2f}{one / seconds / count:>8.2f}")


def peak(h: int, replicas: int) -> tuple[float, float]:
    """For three tasks: MB of the state, and the peak above the memory in use before them."""
    torch.set_num_threads(1)
    x, y = made_up(4 * BATCH, 2)
    tiny, head = start([8], 2)
    tiny.learn([TaskData(x, y, head)])  # what torch loads at its first step should not count
    before = in_use("VmRSS")
    run, head = start([h, h], 2, replicas)
    for _ in range(3):
        run.learn([TaskData(x, y, head)])
    return state_size(run), in_use("VmHWM") - before


def memory() -> None:
    print(
        "memory: three tasks of 784-h-h in a fresh process; the most in use, above that of a process that has trained"
    )
    print("a tiny network, against the state that is kept between tasks\n")
    print(f"{'h':>5}{'R':>4}{'state MB':>10}{'peak MB':>9}{'peak / state':>14}")
    for h, r in MEMORY:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            state, most = pool.submit(peak, h, r).result()
        print(f"{h:>5}{r:>4}{state:>10.1f}{most:>9.1f}{most / state:>14.1f}")


PROGRAMS = {"tasks": tasks, "width": width, "replicas": replicas, "cores": processes, "memory": memory}


def main() -> None:
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or list(PROGRAMS)
    if not set(wanted) <= set(PROGRAMS):
        sys.exit(f"choose among {', '.join(PROGRAMS)}, not {' '.join(wanted)}")
    print(f"torch {torch.__version__}, one thread a process")
    for name in wanted:
        print(flush=True)
        PROGRAMS[name]()


if __name__ == "__main__":
    main()
