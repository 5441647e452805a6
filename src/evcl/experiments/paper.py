"""Reproduce the paper: every method, benchmark and seed. Each cell is stored when done, so work can be interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from evcl import benchmarks, methods
from evcl.experiments.config import Config
from evcl.experiments.folder import open_folder, write_result
from evcl.experiments.parallel import MakeEngine, execute_all
from evcl.experiments.result import HIDDEN, RESULT, Result
from evcl.experiments.run import Event, network
from evcl.experiments.store import Store, key

PAPER_BENCHMARKS = ("permuted-mnist", "split-mnist", "split-notmnist", "split-fashion-mnist", "split-cifar10")
"""The benchmarks of the EVCL paper."""
PAPER_METHODS = (
    "evcl", "vcl", "vcl-random-coreset", "vcl-kcenter-coreset", "ewc", "random-coreset", "kcenter-coreset", "naive",
    "joint",
)  # fmt: skip
"""The methods of the EVCL paper, with naive and joint training."""


class Forecast:
    """The remaining time of a set of runs, estimated from the speed so far; each run is weighted by its cost."""

    def __init__(self, costs: Sequence[float], clock: Callable[[], float] = time.monotonic) -> None:
        self.costs, self.clock = list(costs), clock
        self.done = [0.0] * len(self.costs)
        self.start = clock()

    def update(self, index: int, done: float) -> None:
        """Record that this fraction of run `index` is done, from 0 to 1."""
        self.done[index] = max(self.done[index], done)

    @property
    def part(self) -> float:
        """The fraction of all work that is done, from 0 to 1."""
        whole = sum(self.costs)
        return sum(c * d for c, d in zip(self.costs, self.done, strict=True)) / whole if whole else 1.0

    def remaining(self) -> float | None:
        """The estimated remaining seconds; None while nothing is done."""
        return (self.clock() - self.start) * (1 - self.part) / self.part if self.part > 0 else None


def cost(config: Config) -> float:
    """A rough measure of a run's cost: examples processed, times weights, times products per weight."""
    method = methods.get(config.method)
    weights, examples = _sizes(config.benchmark, config.tasks)
    kept = config.settings.get("coreset_size", 0) if config.settings.get("coreset", "none") != "none" else 0
    tuned = sum(kept * (k + 1) for k in range(config.tasks))  # after each task, the coresets of all tasks so far
    examples = tuned if config.method in ("random-coreset", "kcenter-coreset") else examples + tuned
    return float(examples * weights * (2.2 if method.bayesian else 1) * config.settings.epochs * len(config.seeds))


@cache
def _sizes(benchmark: str, tasks: int) -> tuple[int, int]:
    """The number of weights in the trunk, and of training examples in all tasks."""
    stream = benchmarks.get(benchmark, 0, tasks)
    weights = sum(p.numel() for p in network(stream).parameters())
    return weights, sum(len(task.train) for task in stream)


def reproduce(
    configs: Sequence[Config],
    folder: Path,
    on_event: Callable[[int, Event, Forecast], None] = lambda i, event, forecast: None,
    overwrite: bool = False,
    engine: MakeEngine | None = None,
) -> Iterator[tuple[int, Result]]:
    """Yield (index, result) for each configuration as it is found or ends; results are in FOLDER/BENCHMARK/METHOD.

    Each seed is saved as soon as it is done, in a store in the same folder, so that several processes can share the
    work. A configuration that diverged has no accuracy and no result file.
    """
    store = Store(folder / HIDDEN)
    places = [folder / config.benchmark / config.method for config in configs]
    if overwrite:  # all of it now, so that later work survives an interruption
        for config, place in zip(configs, places, strict=True):
            open_folder(place, config, overwrite=True)
            (place / RESULT).unlink(missing_ok=True)
        store.forget(key(cell) for config in configs for cell in config.cells)
    todo = []
    for i, config in enumerate(configs):
        stored = open_folder(places[i], config)
        if stored is None:
            todo.append(i)
        else:
            yield i, stored
    if not todo:
        return
    store.declare(cell for config in configs for cell in config.cells)
    forecast = Forecast([cost(configs[i]) for i in todo])

    def heard(k: int, event: Event) -> None:
        forecast.update(k, event.done)
        on_event(todo[k], event, forecast)

    for k, result in execute_all([configs[i] for i in todo], heard, allow_divergence=True, store=store, engine=engine):
        forecast.update(k, 1.0)
        if not result.diverged:
            write_result(places[todo[k]], result)
        yield todo[k], result
