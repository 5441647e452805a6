"""Benchmarks that are no sequence of labelled tasks: streams of rows, and of environments. `evcl run` runs them."""

from __future__ import annotations

from functools import partial

from evcl._core.catalogue import BENCHMARK_SUMMARIES
from evcl._core.errors import EvclError
from evcl.benchmarks.benchmark import Benchmark, Entry, Request

REAL = ("weather", "census", "flights-monthly", "mails-by-date", "phishing", "bananas", "segments", "shuttle")
AGENT_STREAMS = {"cartpole-variants": 5, "minigrid-rooms": 4}
GENERATED = ("stagger", "sea", "agrawal", "hyperplane", "led", "rbf")


def _no_tasks(why: str, request: Request) -> Benchmark:
    raise EvclError(why)


def rows(name: str, summary: str, seeded: bool) -> Entry:
    """A stream of rows (`evcl.streams.sources`)."""
    build = partial(_no_tasks, f"{name} is a stream of rows, not of tasks: evcl.streams.get({name!r}) reads it")
    return Entry(name, summary, build, seeded, 1, 1, kind="rows", method="ekf", cpu=True)


def environments(name: str, summary: str, tasks: int) -> Entry:
    """A stream of environments, for agents (`evcl.rl`)."""
    why = f"{name} is a stream of environments, not of examples: use evcl.rl.stream({name!r})"
    return Entry(name, summary, partial(_no_tasks, why), False, tasks, tasks, kind="agents", score="average_return")


ENTRIES = (
    *(environments(name, BENCHMARK_SUMMARIES[name], count) for name, count in AGENT_STREAMS.items()),
    *(rows(name, BENCHMARK_SUMMARIES[name], name in GENERATED) for name in (*REAL, *GENERATED)),
)
