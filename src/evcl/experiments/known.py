"""What readers of results need to know of benchmarks and methods, without torch.

Of those that come with the library it is in `known.json`, which `python tests/experiments/test_known.py` writes; a
user's own are known if they have been registered.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from evcl._core.catalogue import BENCHMARK_SUMMARIES
from evcl._core.errors import EvclError
from evcl._core.settings import Setting

if TYPE_CHECKING:
    from evcl.benchmarks import Entry


class KnownBenchmark(NamedTuple):
    """A benchmark as a report shows it."""

    summary: str
    tasks: int  # the default number
    score: str  # what it is judged by
    kind: str  # whose methods it has: a key of "methods" in the file


_OF_KIND = {None: "tasks", "rows": "rows", "agents": ""}  # those of agents depend on the stream


class KnownMethod(Protocol):
    """A method as a preset and a report use it; an `evcl.methods.Method` is one."""

    @property
    def name(self) -> str: ...
    @property
    def bayesian(self) -> bool: ...
    @property
    def jointly(self) -> bool: ...
    @property
    def known_settings(self) -> Mapping[str, Setting]: ...


class _Stored(NamedTuple):
    name: str
    bayesian: bool
    jointly: bool
    known_settings: Mapping[str, Setting]


@cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files("evcl.experiments").joinpath("known.json").read_text("utf-8"))
    return found


def known_benchmark(name: str) -> KnownBenchmark | None:
    """The benchmark of this name; None if there is none."""
    if name in BENCHMARK_SUMMARIES:
        return KnownBenchmark(BENCHMARK_SUMMARIES[name], **_table()["benchmarks"][name])
    if "evcl.benchmarks" in sys.modules:  # otherwise nothing has been registered
        from evcl.benchmarks import BENCHMARKS

        if name in BENCHMARKS:
            entry: Entry = BENCHMARKS[name]
            return KnownBenchmark(entry.summary, entry.tasks, entry.score, _OF_KIND[entry.kind] or name)
    return None


@cache
def _stored(kind: str, name: str) -> KnownMethod | None:
    found = _table()["methods"].get(kind, {}).get(name)
    if found is None:
        return None
    settings = {
        key: Setting(value[0], "", choices=tuple(value[1])) if isinstance(value, list) else Setting(value, "")
        for key, value in found["settings"].items()
    }
    return _Stored(name, found["bayesian"], found["jointly"], settings)


def known_method(benchmark: str, name: str) -> KnownMethod | None:
    """The method of this name with the settings that it has on a benchmark; None if there is none."""
    about = known_benchmark(benchmark)
    found = _stored("tasks" if about is None else about.kind, name)
    if found is None and "evcl.methods" in sys.modules:
        from evcl.experiments.config import method_of
        from evcl.methods import METHODS

        try:
            return METHODS.get(name) if about is None else method_of(benchmark, name)
        except EvclError:
            return None
    return found
