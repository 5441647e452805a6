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
from evcl.files import write_atomically

KEYS = ("benchmarks", "validation", "seeds", "trials", "preset", "methods")


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
    try:
        search = Search(
            tuple(found["benchmarks"]),
            float(found["validation"]),
            tuple(found["seeds"]),
            int(found["trials"]),
            found.get("preset", "paper"),
            found["methods"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EvclError(f"{path}: {error} is missing, or not of its kind") from error
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
    if "choices" in spec:
        return spec["choices"][min(int(at * len(spec["choices"])), len(spec["choices"]) - 1)]
    if not {"low", "high"} <= spec.keys() or not 0 < spec["low"] < spec["high"]:
        raise EvclError(f"{name} must be a value, choices = [...], or low and high, above 0, not {dict(spec)}")
    low, high = math.log(spec["low"]), math.log(spec["high"])
    return float(f"{math.exp(low + at * (high - low)):.3g}")


def _configs(search: Search, benchmark: str, method: str, device: str, precision: str | None) -> list[Config]:
    name, _, tasks = benchmark.partition(":")
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
    found = dict(execute_all(configs, on_event))
    tried: dict[str, list[dict[str, Any]]] = {method: [] for method in search.spaces}
    for i, (method, config) in enumerate(zip(owners, configs, strict=True)):
        accuracy = found[i]["average_accuracy"]
        settings = {name: config.settings[name] for name in search.spaces[method] if name != "method"}
        tried[method].append({"settings": settings, **accuracy})
    return {
        "benchmark": benchmark,
        "validation": search.validation,
        "seeds": list(search.seeds),
        "preset": search.preset,
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.perf_counter() - start, 1),
        "environment": environment(device),
        "tried": {method: sorted(each, key=lambda t: -(t["mean"] or 0)) for method, each in tried.items()},
    }


def recipe(results: Sequence[Mapping[str, Any]], method: str) -> tuple[dict[str, Any], list[float]]:
    """The one trial of a method that is best on all benchmarks together: by the mean of its distance to the best."""
    best = [result["tried"][method][0]["mean"] for result in results]
    regret: dict[str, list[float]] = {}
    for result, top in zip(results, best, strict=True):
        for trial in result["tried"][method]:
            key = json.dumps(trial["settings"], sort_keys=True)
            regret.setdefault(key, []).append(top - (trial["mean"] or 0))
    complete = {key: each for key, each in regret.items() if len(each) == len(results)}
    key = min(complete, key=lambda k: sum(complete[k]))
    return json.loads(key), [top - lost for top, lost in zip(best, complete[key], strict=True)]


def write_json(path: Path, found: Mapping[str, Any]) -> None:
    text = json.dumps(found, indent=1) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, "utf-8"))
