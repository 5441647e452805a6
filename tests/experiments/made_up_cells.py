"""Results that nobody trained for, benchmarks of a test's own, and the programs in experiments/."""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from evcl.benchmarks import BENCHMARKS, Benchmark, Entry, get, register
from evcl.experiments import Environment, Result
from evcl.experiments.result import MEASURES, summarise


def result_of(config, accuracy=0.5):
    matrix = [[accuracy if k <= t else None for k in range(config.tasks)] for t in range(config.tasks)]
    return Result(
        benchmark=config.benchmark,
        method=config.method,
        preset=config.preset,
        config={**config.settings, "tasks": config.tasks, "precision": config.precision, "device": config.device},
        seeds=list(config.seeds),
        accuracy=[matrix],
        **dict.fromkeys(MEASURES, summarise([accuracy])),
        seconds=1.0,
        environment=Environment("0.1.0", "2.13.0", "a", 1, "b"),
    )


def untimed(result):
    return replace(result, seconds=0.0)


@contextmanager
def registered(name, tasks=None, **network):
    """While this lasts, there is a benchmark of this name: the split digits or these tasks, with a trunk of its own."""

    def build(request):
        return Benchmark(name, tasks or get("split-digits"), seed=request.seed, **network)

    register(Entry(name, "", build, seeded=False))
    try:
        yield name
    finally:
        BENCHMARKS.remove(name)


EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@contextmanager
def programs_of(folder, *names, also=()):
    """The modules of a folder of experiments/, loaded afresh; they import those in `also`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXPERIMENTS / folder))
        for name in (*names, *also):
            patch.delitem(sys.modules, name, raising=False)
        yield [importlib.import_module(name) for name in names]
        for name in (*names, *also):
            sys.modules.pop(name, None)
