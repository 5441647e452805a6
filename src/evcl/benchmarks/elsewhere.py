"""Benchmarks that are no sequence of labelled tasks: how they run is in another package, imported when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from evcl._core.errors import EvclError
from evcl._core.summaries import BENCHMARK_SUMMARIES
from evcl.benchmarks.benchmark import Benchmark, Entry, Kind, Request


class Elsewhere:
    """A `Kind` that `make(benchmark)` of another module makes. Importing benchmarks does not import that module."""

    def __init__(self, module: str, benchmark: str) -> None:
        self.module, self.benchmark = module, benchmark

    def _found(self) -> Kind:
        kind: Kind = importlib.import_module(self.module).make(self.benchmark)
        return kind

    def method(self, name: str) -> Any:
        return self._found().method(name)

    def execute(self, cells: Sequence[Any], on_event: Any, allow_divergence: bool, checkpoints: Any) -> list[Any]:
        return self._found().execute(cells, on_event, allow_divergence, checkpoints)


def _agents(name: str, tasks: int) -> Entry:
    """A stream of environments, for agents."""

    def build(request: Request) -> Benchmark:
        raise EvclError(f"{name} is a stream of environments, not of examples: use evcl.rl.stream({name!r})")

    kind = Elsewhere("evcl.experiments.agents", name)
    about = (name, BENCHMARK_SUMMARIES[name], build)
    return Entry(*about, seeded=False, tasks=tasks, most_tasks=tasks, kind=kind, score="average_return")


ENTRIES = (_agents("cartpole-variants", 5), _agents("minigrid-rooms", 4))
