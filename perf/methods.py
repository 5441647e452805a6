"""What each method costs, relative to naive training, on one core. Writes src/evcl/_core/costs.json, prints a table.

`step` is the time of a step in the second task, in steps of naive. `task` is what the task costs besides the steps of
its first fit, in epochs of naive over as many rows: the Fisher, the teacher's outputs, choosing a coreset and
fine-tuning on it. The settings are each method's defaults, except that all batches have 64 rows.

`python perf/methods.py` measures every method; with names, as in `python perf/methods.py si mas`, only these are
measured, and the others keep their entries.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import evcl
from evcl._core.catalogue import COSTS
from evcl._core.randomness import generator
from evcl._core.settings import resolve
from evcl.experiments.run import environment
from evcl.methods import METHODS
from evcl.training import Run, Step, TaskData
from evcl.training.observer import Observer, Progress

ROWS, BATCH, ROUNDS = 10_000, 64, 14
Costs = dict[str, float]  # of one method: `step` and `task`
clock = time.process_time  # of this process alone: what other programs take is not counted


class Network(NamedTuple):
    inputs: int
    hidden: list[int]
    classes: int
    own_heads: bool


NETWORKS = {
    "784-256-256": Network(784, [256, 256], 2, True),  # as in split-mnist
    "64-100-100": Network(64, [100, 100], 10, False),  # as in permuted-digits
}


class Timer(Observer):
    """The time of each fit of a round, and of each step of the first."""

    def __init__(self) -> None:
        self.fits: list[float] = []
        self.steps: list[float] = []

    def begin_fit(self, stage: int, step: Step, stopped: Tensor, epochs: int, batches: int) -> None:
        self.fits.append(0.0)

    def begin_epoch(self, epoch: int) -> None:
        self.last = clock()

    def due(self) -> bool:
        """A step has ended."""
        self._tick()
        if len(self.fits) == 1:
            self.steps.append(self.took)
        return False

    def end_epoch(self, progress: Progress) -> None:
        self._tick()

    def _tick(self) -> None:
        now = clock()
        self.took, self.last = now - self.last, now
        self.fits[-1] += self.took


class Cost(NamedTuple):
    """Seconds of a round: of the median step, of an epoch, and of everything else."""

    step: float
    epoch: float
    besides: float


def second_task(name: str, network: Network, rows: int, **given: Any) -> Callable[[], Cost]:
    """Let a method learn a task; the function that is returned learns a second one, and forgets it again."""
    method = METHODS[name]
    epochs = int(method.known_settings["epochs"].default)
    settings = resolve(name, method.known_settings, {"epochs": 1, "batch_size": BATCH, **given})
    run = Run(evcl.nn.mlp(network.inputs, network.hidden), method, [settings], [0], draw=True)
    source, tasks = generator(0, "perf"), []
    for k in range(2):
        x = torch.rand(1, rows, network.inputs, generator=source)
        y = torch.randint(network.classes, (1, rows), generator=source)
        tasks.append(TaskData(x, y, k if network.own_heads else 0, task=k))
    for _ in {task.head for task in tasks}:
        run.add_head(network.hidden[-1], network.classes)
    run.learn(tasks[:1])

    def learn() -> Cost:
        timer, start, own = Timer(), clock(), run.forked(run.network.call)
        own.learn(tasks[1:], observer=timer)
        rest = clock() - start - sum(timer.fits)
        first, *later = timer.fits or [0.0]  # a method may train nothing
        step = statistics.median(timer.steps or [0.0])
        return Cost(step, first, rest + epochs * sum(later))  # fine-tuning: usual epochs

    return learn


def measure(
    names: Sequence[str], network: Network, rows: int = ROWS, rounds: int = ROUNDS, **given: Any
) -> dict[str, Costs]:
    """The medians over rounds in which naive and the method take turns to be first. A round before fills the caches."""
    naive, found = second_task("naive", network, rows), {}
    for name in names:
        one = second_task(name, network, rows, **given)
        pairs = [(naive(), one()) if i % 2 else (one(), naive())[::-1] for i in range(rounds + 1)][1:]
        step = statistics.median(cost.step / plain.step for plain, cost in pairs)
        task = statistics.median(cost.besides / plain.epoch for plain, cost in pairs)
        found[name] = {"step": round(step, 2), "task": round(task, 2)}
    return found


def write(path: Path, found: dict[str, dict[str, Costs]], where: str | None) -> Any:
    """Add to the file what was found, in the order of `evcl list`; `where` is None if only some were measured."""
    kept = json.loads(path.read_text("utf-8")) if path.exists() else {"where": where, "costs": {}}
    for network, costs in found.items():
        both = {**kept["costs"].get(network, {}), **costs}
        kept["costs"][network] = {name: both[name] for name in METHODS if name in both}
    kept["where"] = where or kept["where"]
    path.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    return kept


def table(costs: dict[str, dict[str, Costs]]) -> str:
    """The costs as Markdown, for docs/PERFORMANCE.md."""
    lines = ["| method |" + "".join(f" {name}: step | task |" for name in costs), "|---" * (1 + 2 * len(costs)) + "|"]
    for name in next(iter(costs.values())):
        cells = "".join(f" {one[name]['step']:.2f} | {one[name]['task']:.2f} |" for one in costs.values())
        lines.append(f"| `{name}` |{cells}")
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)
    names = [METHODS[name].name for name in sys.argv[1:]] or list(METHODS)
    where = f"{datetime.date.today()}, one thread, {environment('cpu').device}, torch {torch.__version__}"
    found = {name: measure(names, network) for name, network in NETWORKS.items()}
    kept = write(COSTS, found, where if len(names) == len(METHODS) else None)
    print(f"{kept['where']}; batches of {BATCH} rows, {ROWS:,} rows per epoch\n")
    print(table(kept["costs"]))
    for name, network in NETWORKS.items():
        print(f"\nnaive with film=true, {name}: step {measure(['naive'], network, film=True)['naive']['step']:.2f}")


if __name__ == "__main__":
    main()
