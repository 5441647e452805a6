"""The whole paper: every method, benchmark and seed, kept cell by cell, so that it can be stopped and started again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from evcl import benchmarks, methods
from evcl.errors import EvclError
from evcl.experiments.parallel import execute_all
from evcl.experiments.run import RESULT, Config, Event, merge, network, open_folder, read_result, write_result

PAPER_BENCHMARKS = ("permuted-mnist", "split-mnist", "split-notmnist", "split-fashion-mnist", "split-cifar10")
PAPER_METHODS = (
    "evcl", "vcl", "vcl-random-coreset", "vcl-kcenter-coreset", "ewc", "random-coreset", "kcenter-coreset", "naive",
    "joint",
)  # fmt: skip


class Forecast:
    """How long a set of runs will still take: at the speed so far, each run counted by its `work`."""

    def __init__(self, work: Sequence[float], clock: Callable[[], float] = time.monotonic) -> None:
        self.work, self.clock = list(work), clock
        self.done = [0.0] * len(self.work)
        self.start = clock()

    def update(self, index: int, done: float) -> None:
        """Run `index` is done to this part, from 0 to 1."""
        self.done[index] = max(self.done[index], done)

    @property
    def part(self) -> float:
        """Of all work, what is done, from 0 to 1."""
        whole = sum(self.work)
        return sum(w * d for w, d in zip(self.work, self.done, strict=True)) / whole if whole else 1.0

    def remaining(self) -> float | None:
        """Seconds; None while nothing is done."""
        return (self.clock() - self.start) * (1 - self.part) / self.part if self.part > 0 else None


def work(config: Config) -> float:
    """About how much there is to do in a run: examples shown, times weights, times products a weight."""
    method = methods.get(config.method)
    weights, shown = _sizes(config.benchmark, config.tasks)
    kept = config.settings.get("coreset_size", 0) if config.settings.get("coreset", "none") != "none" else 0
    tuned = sum(kept * (k + 1) for k in range(config.tasks))  # after each task, on all so far
    shown = tuned if method.coreset_only else shown + tuned
    return float(shown * weights * (2.2 if method.bayesian else 1) * config.settings.epochs * len(config.seeds))


@cache
def _sizes(benchmark: str, tasks: int) -> tuple[int, int]:
    """Weights of the network's trunk, and examples of all tasks."""
    stream = benchmarks.get(benchmark, 0, tasks)
    weights = sum(p.numel() for p in network(stream).parameters())
    return weights, sum(len(task.train) for task in stream)


@dataclass(frozen=True)
class Cell:
    """A part of the work that is kept when it is done: one configuration and some of its seeds."""

    config: Config
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / f"seeds-{'-'.join(map(str, self.config.seeds))}.json"


def reproduce(
    configs: Sequence[Config],
    folder: Path,
    on_event: Callable[[int, Event, Forecast], None] = lambda i, event, forecast: None,
    overwrite: bool = False,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(index, result) of each configuration, as it is found or ends; results lie in FOLDER/BENCHMARK/METHOD.

    On a CPU a seed is kept when it is done; on a GPU, where all seeds share a program, a configuration. One whose loss
    is lost has no accuracy, and is not kept.
    """
    if overwrite:  # at once, so that what is done from now on is kept if this is stopped
        for config in configs:
            place = folder / config.benchmark / config.method
            open_folder(place, config, overwrite=True)
            for path in (place / RESULT, *place.glob("seeds-*.json")):
                path.unlink(missing_ok=True)
    cells: list[tuple[int, Cell]] = []
    for i, config in enumerate(configs):
        place = folder / config.benchmark / config.method
        found = open_folder(place, config)
        if found is not None:
            yield i, found
            continue
        parts = [config] if config.device == "cuda" else [replace(config, seeds=(seed,)) for seed in config.seeds]
        cells += [(i, Cell(part, place)) for part in parts]
    kept: dict[int, dict[tuple[int, ...], dict[str, Any]]] = {}
    todo = []
    for i, cell in cells:
        found = _kept(cell)
        if found is None:
            todo.append((i, cell))
        else:
            kept.setdefault(i, {})[cell.config.seeds] = found
            if result := _complete(configs[i], kept[i], cell.folder):
                yield i, result
    forecast = Forecast([work(cell.config) for _, cell in todo])

    def heard(index: int, event: Event) -> None:
        forecast.update(index, event.done)
        on_event(todo[index][0], event, forecast)

    for index, part in execute_all([cell.config for _, cell in todo], heard, tolerant=True) if todo else ():
        i, cell = todo[index]
        forecast.update(index, 1.0)
        if not _lost(part):
            write_result(cell.folder, part, cell.path.name)
        kept.setdefault(i, {})[cell.config.seeds] = part
        if result := _complete(configs[i], kept[i], cell.folder):
            yield i, result


def _lost(result: dict[str, Any]) -> bool:
    return result["average_accuracy"]["mean"] is None


def _kept(cell: Cell) -> dict[str, Any] | None:
    """The cell's result from an earlier time, if it is of the same configuration."""
    try:
        return open_folder(cell.folder, cell.config, name=cell.path.name)
    except EvclError:
        return None


def _complete(config: Config, parts: dict[tuple[int, ...], dict[str, Any]], folder: Path) -> dict[str, Any] | None:
    """One result of all seeds, written in the place of the parts unless it is lost; None while some are missing."""
    if {seed for seeds in parts for seed in seeds} != set(config.seeds):
        return None
    ordered = sorted(parts.items(), key=lambda item: config.seeds.index(item[0][0]))
    result = merge([part for _, part in ordered])
    if _lost(result):
        return result
    write_result(folder, result)
    for path in folder.glob("seeds-*.json"):
        path.unlink()
    return read_result(folder / RESULT)
