"""The search for a method's settings: the same number of trials for every method, measured on validation data alone.

A search is a TOML file, and its result a JSON file beside it that says when, how and on what it was found:

    benchmarks = ["split-mnist", "permuted-mnist"]
    validation = 0.1            # part of each training set that is measured on
    seeds = [100, 101, 102]
    trials = 32                 # a method, the same ones on every benchmark
    preset = "paper"            # where what is not searched comes from

    [methods.evcl]
    strength = {low = 1.0, high = 1e5}      # any value between, evenly by its logarithm
    epochs = {choices = [20, 50, 100]}
    std_update = "natural"                  # not searched

A table may be of another name than its method, which it then names: `method = "evcl"`. The trials of a method are the
points of a Sobol sequence, so that they cover its space evenly.
"""

from __future__ import annotations

import json
import math
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evcl.errors import EvclError, unknown
from evcl.experiments.parallel import execute_all
from evcl.experiments.run import Config, Event, configure, environment

KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "benchmarks": (list, "a list of names"),
    "validation": ((int, float), "a number above 0 and below 1"),
    "seeds": (list, "a list of whole numbers"),
    "trials": (int, "a whole number, at least 1"),
    "preset": (str, "a preset's name"),
    "methods": (dict, "a table for each method"),
}
KEYS = tuple(KINDS)


@dataclass(frozen=True)
class Search:
    """A search file, checked."""

    benchmarks: tuple[str, ...]
    validation: float
    seeds: tuple[int, ...]
    trials: int
    preset: str
    spaces: Mapping[str, Mapping[str, Any]]  # of each method: setting -> value, range or choices


def read_search(path: Path) -> Search:
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise EvclError(f"{path} cannot be read as TOML: {error}") from error
    for key in found:
        if key not in KEYS:
            raise EvclError(f"{path}: {unknown('key', key, KEYS)}")
    found = {"preset": "paper", **found}
    for key, (kind, what) in KINDS.items():
        if not isinstance(found.get(key), kind) or isinstance(found[key], bool) or not found[key]:
            raise EvclError(f"{path}: {key} must be {what}, not {found.get(key)!r}")
    if not all(isinstance(name, str) for name in found["benchmarks"]):
        raise EvclError(f"{path}: benchmarks must be a list of names, not {found['benchmarks']}")
    for method, space in found["methods"].items():
        if not isinstance(space, dict):
            raise EvclError(f"{path}: methods.{method} must be a table of settings, not {space!r}")
    search = Search(
        tuple(found["benchmarks"]), float(found["validation"]), tuple(found["seeds"]), found["trials"], found["preset"],
        found["methods"],
    )  # fmt: skip
    if not 0 < search.validation < 1 or search.trials < 1:
        raise EvclError(f"{path}: validation must lie between 0 and 1, and trials must be at least 1")
    for benchmark in search.benchmarks:
        for method in search.spaces:
            _configs(search, benchmark, method, "cpu", None)  # every trial is a valid configuration
    return search


def trials(search: Search, method: str) -> list[dict[str, Any]]:
    """The settings of a method's trials, as many of one as of another."""
    space = {name: value for name, value in search.spaces[method].items() if name != "method"}
    searched = [name for name, value in space.items() if isinstance(value, dict)]
    points = torch.zeros(search.trials, 0)
    if searched:
        points = torch.quasirandom.SobolEngine(len(searched), scramble=True, seed=0).draw(search.trials)
    found = []
    for point in points.tolist():
        chosen = {name: _value(name, space[name], at) for name, at in zip(searched, point, strict=True)}
        found.append({name: chosen.get(name, value) for name, value in space.items()})
    return found if searched else found[:1]


def _value(name: str, spec: Mapping[str, Any], at: float) -> Any:
    """The value at a point between 0 and 1."""
    if isinstance(spec.get("choices"), list) and spec["choices"]:
        return spec["choices"][min(int(at * len(spec["choices"])), len(spec["choices"]) - 1)]
    low, high = spec.get("low"), spec.get("high")
    if not isinstance(low, int | float) or not isinstance(high, int | float) or not 0 < low < high:
        raise EvclError(f"{name} must be a value, choices = [...], or low and high, above 0, not {dict(spec)}")
    value = math.exp(math.log(low) + at * math.log(high / low))
    return min(max(float(f"{value:.3g}"), low), high)


def _configs(search: Search, benchmark: str, method: str, device: str, precision: str | None) -> list[Config]:
    name, _, tasks = benchmark.partition(":")
    if tasks and not tasks.isdecimal():
        raise EvclError(f"a benchmark is a name, or a name and how many tasks (permuted-mnist:10), not {benchmark!r}")
    of = search.spaces[method].get("method", method)
    return [
        configure(
            name, of, search.preset, search.seeds, int(tasks) if tasks else None,
            {**settings, "validation": search.validation}, device, precision,
        )
        for settings in trials(search, method)
    ]  # fmt: skip


def tune(
    search: Search,
    benchmark: str,
    device: str = "cpu",
    precision: str | None = None,
    on_event: Callable[[int, Event], None] = lambda i, event: None,
) -> dict[str, Any]:
    """Every method's trials on one benchmark: what was tried and what came of it, best first."""
    owners, configs = [], []
    for method in search.spaces:
        for config in _configs(search, benchmark, method, device, precision):
            owners.append(method)
            configs.append(config)
    start = time.perf_counter()
    found = dict(execute_all(configs, on_event, tolerant=True))
    tried: dict[str, list[dict[str, Any]]] = {method: [] for method in search.spaces}
    for i, (method, config) in enumerate(zip(owners, configs, strict=True)):
        accuracy = found[i]["average_accuracy"]
        settings = {name: config.settings[name] for name in search.spaces[method] if name != "method"}
        tried[method].append({"settings": settings, **accuracy})
    return {
        "benchmark": benchmark,
        **_asked(search),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.perf_counter() - start, 1),
        "environment": environment(device),
        "tried": {method: sorted(each, key=lambda t: -(t["mean"] or 0)) for method, each in tried.items()},
    }


def _asked(search: Search) -> dict[str, Any]:
    """What a search asks for, as its results hold it."""
    spaces = {method: dict(space) for method, space in search.spaces.items()}
    asked = {"validation": search.validation, "seeds": list(search.seeds), "trials": search.trials}
    return {**asked, "preset": search.preset, "methods": spaces}


def read_found(path: Path, search: Search) -> dict[str, Any]:
    """What `tune` found earlier, if it was for this search."""
    try:
        found = dict(json.loads(path.read_text("utf-8")))
        same = {key: found[key] for key in _asked(search)} == _asked(search)
        found["tried"], found["benchmark"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EvclError(f"{path} is not what a search found: pass --overwrite or another --out") from error
    if not same:
        raise EvclError(f"{path} holds what another search found: pass --overwrite or another --out")
    return found


def recipe(results: Sequence[Mapping[str, Any]], method: str) -> tuple[dict[str, Any], list[float]]:
    """The one trial of a method that is best on all benchmarks together: by the mean of its distance to the best."""
    tables = [
        {json.dumps(trial["settings"], sort_keys=True): trial["mean"] or 0.0 for trial in result["tried"][method]}
        for result in results
    ]
    best = [max(table.values()) for table in tables]
    everywhere = [key for key in tables[0] if all(key in table for table in tables)]
    key = min(everywhere, key=lambda k: sum(top - table[k] for top, table in zip(best, tables, strict=True)))
    return json.loads(key), [table[key] for table in tables]
