"""What `evcl report` knows without torch is what is registered. `python tests/experiments/test_known.py` writes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import evcl
from evcl import experiments, methods
from evcl._core.catalogue import BENCHMARK_SUMMARIES, METHOD_SUMMARIES
from evcl.benchmarks import BENCHMARKS
from evcl.experiments.config import method_of
from evcl.experiments.known import known_method
from evcl.experiments.streams import METHODS as OF_ROWS

OF_AGENTS = ("evcl", "vcl", "gvcl", "ewc", "ewc-offline", "si", "mas", "clear", "naive", "separate")
FILE = Path(evcl.__file__).parent / "experiments" / "known.json"


def kind(name):
    return {None: "tasks", "rows": "rows", "agents": name}[BENCHMARKS[name].kind]


def names(benchmark):
    """The methods that come with the library for this benchmark."""
    return {"tasks": METHOD_SUMMARIES, "rows": OF_ROWS}.get(kind(benchmark), OF_AGENTS)


def stored(method):
    settings = {
        name: [one.default, list(one.choices)] if one.choices else one.default
        for name, one in method.known_settings.items()
    }
    return {"bayesian": method.bayesian, "jointly": method.jointly, "settings": settings}


def registered():
    of = {kind(name): name for name in BENCHMARK_SUMMARIES}
    return {
        "benchmarks": {
            name: {"tasks": BENCHMARKS[name].tasks, "score": BENCHMARKS[name].score, "kind": kind(name)}
            for name in BENCHMARK_SUMMARIES
        },
        "methods": {
            what: {name: stored(method_of(benchmark, name)) for name in names(benchmark)}
            for what, benchmark in of.items()
        },
    }


def test_the_file_holds_what_is_registered():
    assert json.loads(FILE.read_text("utf-8")) == registered()


@pytest.mark.parametrize("benchmark", ["split-digits", "permuted-mnist", "weather", "cartpole-variants"])
def test_presets_are_the_same_without_torch(benchmark):
    for name in names(benchmark):
        method, known = method_of(benchmark, name), known_method(benchmark, name)
        for preset in ("tuned", "default", "paper"):
            assert experiments.preset(preset, benchmark, known) == experiments.preset(preset, benchmark, method), name


def test_methods_of_a_users_own_are_known_where_they_are_registered():
    assert known_method("split-digits", "of-mine") is None
    methods.register(methods.Method("of-mine", "a method", bayesian=False))
    try:
        assert known_method("split-digits", "of-mine").name == "of-mine"
    finally:
        methods.METHODS.remove("of-mine")


if __name__ == "__main__":
    FILE.write_text(json.dumps(registered(), indent=1) + "\n", "utf-8")
