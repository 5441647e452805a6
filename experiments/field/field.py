"""What `field.toml` says: the searches of the table of the field, what they chose, and where their files are."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evcl.experiments import Config, configure
from evcl.experiments.compare import Plan
from evcl.experiments.search import Search, named_tasks
from evcl.methods import METHODS

HERE = Path(__file__).parent
FIELD: dict[str, Any] = tomllib.loads((HERE / "field.toml").read_text("utf-8"))
BENCHMARKS: list[str] = list(FIELD["benchmarks"])
SCENARIOS: list[str] = list(FIELD["scenarios"])  # benchmarks by another name, with a scenario and a memory
OF_A_CONFIG = ("scenario", "network")  # these are settings of a run, not of a method
OF_A_TEST = ("scenario", "network", "memory", "fisher_examples")  # what differs from the benchmark of `settings_of`
RANGES: dict[str, dict[str, Any]] = {**FIELD["fast"], **FIELD["slow"]}


def about(benchmark: str) -> dict[str, Any]:
    """What field.toml says of a benchmark or scenario."""
    found: dict[str, Any] = FIELD["benchmarks"].get(benchmark) or FIELD["scenarios"][benchmark]
    return found


def methods_on(benchmark: str) -> list[str]:
    """The methods that are compared on a benchmark."""
    own = about(benchmark)
    found: list[str] = own.get("methods", [*FIELD["fast"], *(FIELD["slow"] if own.get("slow") else ())])
    return found


def searched(benchmark: str) -> str:
    """The benchmark whose searches chose the settings for this one: itself, unless it has a line `settings_of`."""
    found: str = about(benchmark).get("settings_of", benchmark)
    return found


def stream_of(benchmark: str) -> str:
    """The name of a benchmark in evcl."""
    found: str = about(benchmark).get("stream", benchmark)
    return found


def search_of(benchmark: str, methods: Sequence[str]) -> Search:
    """The search for these methods' settings: their defaults first, which win a tie, then their ranges."""
    spaces = {}
    for method in methods:
        known = METHODS[method].known_settings
        common = {name: value for name, value in about(benchmark).items() if name in known or name in OF_A_CONFIG}
        space = common | RANGES[method] | about(benchmark).get("ranges", {}).get(method, {})
        spaces[method] = [{name: value for name, value in space.items() if not isinstance(value, dict)}, space]
    return Search(
        benchmarks=(stream_of(benchmark),),
        validation=FIELD["validation"],
        seeds=tuple(FIELD["search_seeds"]),
        trials=FIELD["trials"],
        preset="default",
        methods=spaces,
    )


def config_of(
    benchmark: str, method: str, settings: Mapping[str, Any], device: str = "cpu", precision: str | None = None
) -> Config:
    """The configuration that meets the test data, with these settings of the best trial."""
    name, tasks = named_tasks(stream_of(benchmark))
    own, known = about(benchmark), METHODS[method].known_settings
    keys = [key for key in OF_A_TEST if key in own and (key != "fisher_examples" or key in known)]
    settings = {**settings, **{key: own[key] for key in keys}}
    seeds = own.get("test_seeds", FIELD["test_seeds"])
    return configure(name, method, "default", seeds, tasks, settings, device, precision)


PLAN = Plan(search_of, config_of, searched)
