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

A table may be of another name than its method, which it then names: `method = "evcl"`. Several tables of one name,
`[[methods.evcl]]`, are alternatives that share its trials. The trials are the points of a Sobol sequence, so that they
cover a space evenly. With `refine = 12`, as many more follow for each method, in a quarter of each range (by logarithm)
around its best trial on that benchmark; choices stay as they are there.
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
    "refine": (int, "a whole number, at least 0"),
    "preset": (str, "a preset's name"),
    "methods": (dict, "a table for each method"),
}
KEYS = tuple(KINDS)
Space = Mapping[str, Any]  # setting -> value, range or choices


@dataclass(frozen=True)
class Search:
    """A search file, checked."""

    benchmarks: tuple[str, ...]
    validation: float
    seeds: tuple[int, ...]
    trials: int
    preset: str
    spaces: Mapping[str, Sequence[Space]]  # of each method its alternatives
    refine: int = 0


def read_search(path: Path) -> Search:
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise EvclError(f"{path} cannot be read as TOML: {error}") from error
    for key in found:
        if key not in KEYS:
            raise EvclError(f"{path}: {unknown('key', key, KEYS)}")
    found = {"preset": "paper", "refine": 0, **found}
    for key, (kind, what) in KINDS.items():
        empty = key != "refine" and not found.get(key)
        if not isinstance(found.get(key), kind) or isinstance(found[key], bool) or empty:
            raise EvclError(f"{path}: {key} must be {what}, not {found.get(key)!r}")
    if not all(isinstance(name, str) for name in found["benchmarks"]):
        raise EvclError(f"{path}: benchmarks must be a list of names, not {found['benchmarks']}")
    search = Search(
        tuple(found["benchmarks"]), float(found["validation"]), tuple(found["seeds"]), found["trials"], found["preset"],
        _spaces(path, found["methods"], found["trials"]), found["refine"],
    )  # fmt: skip
    if not 0 < search.validation < 1 or search.trials < 1 or search.refine < 0:
        raise EvclError(f"{path}: validation must lie between 0 and 1, trials be at least 1, and refine at least 0")
    for benchmark in search.benchmarks:
        for method in search.spaces:  # every trial is a valid configuration
            for settings in trials(search, method):
                _config(search, benchmark, method, settings, "cpu", None)
    return search


def _spaces(path: Path, methods: Mapping[str, Any], trials: int) -> dict[str, Sequence[Space]]:
    spaces: dict[str, Sequence[Space]] = {}
    for name, space in methods.items():
        spaces[name] = space if isinstance(space, list) else [space]
    for method, alternatives in spaces.items():
        if not alternatives or not all(isinstance(space, dict) for space in alternatives):
            raise EvclError(f"{path}: methods.{method} must be a table of settings, not {methods[method]!r}")
        if len({space.get("method", method) for space in alternatives}) > 1 or len(alternatives) > trials:
            raise EvclError(f"{path}: the tables of methods.{method} must be of one method, at most as many as trials")
    return spaces


def trials(search: Search, method: str, best: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """The settings of a method's trials, as many of one as of another; with `best`, those of the refinement."""
    alternatives = search.spaces[method]
    if best is not None:
        return _points(_near(_of(alternatives, best), best), search.refine, 1)
    share, more = divmod(search.trials, len(alternatives))
    return [trial for i, space in enumerate(alternatives) for trial in _points(space, share + (i < more), 0)]


def _points(space: Space, count: int, seed: int) -> list[dict[str, Any]]:
    space = {name: value for name, value in space.items() if name != "method"}
    searched = [name for name, value in space.items() if isinstance(value, dict)]
    if not searched:
        return [dict(space)]
    found = []
    for point in torch.quasirandom.SobolEngine(len(searched), scramble=True, seed=seed).draw(count).tolist():
        chosen = {name: _value(name, space[name], at) for name, at in zip(searched, point, strict=True)}
        found.append({name: chosen.get(name, value) for name, value in space.items()})
    return found


def _of(alternatives: Sequence[Space], trial: Mapping[str, Any]) -> Space:
    """The one that a trial came from."""

    def fits(space: Space) -> bool:
        fixed = {name: value for name, value in space.items() if name != "method"}
        return fixed.keys() == trial.keys() and all(isinstance(v, dict) or trial[k] == v for k, v in fixed.items())

    return next(space for space in alternatives if fits(space))


def _near(space: Space, best: Mapping[str, Any]) -> Space:
    """A quarter of each range, around the best."""

    def narrowed(name: str, value: Any) -> Any:
        if not isinstance(value, dict) or "choices" in value:
            return best.get(name, value)
        away = (value["high"] / value["low"]) ** 0.125
        return {"low": max(value["low"], best[name] / away), "high": min(value["high"], best[name] * away)}

    return {name: narrowed(name, value) for name, value in space.items()}


def _value(name: str, spec: Mapping[str, Any], at: float) -> Any:
    """The value at a point between 0 and 1."""
    if isinstance(spec.get("choices"), list) and spec["choices"]:
        return spec["choices"][min(int(at * len(spec["choices"])), len(spec["choices"]) - 1)]
    low, high = spec.get("low"), spec.get("high")
    if not isinstance(low, int | float) or not isinstance(high, int | float) or not 0 < low < high:
        raise EvclError(f"{name} must be a value, choices = [...], or low and high, above 0, not {dict(spec)}")
    value = math.exp(math.log(low) + at * math.log(high / low))
    return min(max(float(f"{value:.3g}"), low), high)


def _config(
    search: Search, benchmark: str, method: str, settings: Mapping[str, Any], device: str, precision: str | None
) -> Config:
    name, _, tasks = benchmark.partition(":")
    if tasks and not tasks.isdecimal():
        raise EvclError(f"a benchmark is a name, or a name and how many tasks (permuted-mnist:10), not {benchmark!r}")
    of = search.spaces[method][0].get("method", method)
    given = {**settings, "validation": search.validation}
    return configure(name, of, search.preset, search.seeds, int(tasks) if tasks else None, given, device, precision)


def tune(
    search: Search,
    benchmark: str,
    device: str = "cpu",
    precision: str | None = None,
    on_event: Callable[[int, Event], None] = lambda i, event: None,
) -> dict[str, Any]:
    """Every method's trials on one benchmark: what was tried and what came of it, best first."""
    start = time.perf_counter()
    tried: dict[str, list[dict[str, Any]]] = {method: [] for method in search.spaces}

    def measure(wanted: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        before = sum(map(len, tried.values()))
        configs = [_config(search, benchmark, method, settings, device, precision) for method, settings in wanted]
        found = dict(execute_all(configs, lambda i, event: on_event(before + i, event), tolerant=True))
        for i, (method, settings) in enumerate(wanted):
            tried[method].append({"settings": settings, **found[i]["average_accuracy"]})
        for each in tried.values():
            each.sort(key=lambda trial: -(trial["mean"] or 0))

    measure([(method, settings) for method in tried for settings in trials(search, method)])
    if search.refine:
        bests = {method: each[0]["settings"] for method, each in tried.items()}
        measure([(method, settings) for method in tried for settings in trials(search, method, bests[method])])
    return {
        "benchmark": benchmark,
        **_asked(search),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.perf_counter() - start, 1),
        "environment": environment(device),
        "tried": tried,
    }


def _asked(search: Search) -> dict[str, Any]:
    """What a search asks for, as its results hold it."""
    spaces = {method: each[0] if len(each) == 1 else list(each) for method, each in search.spaces.items()}
    asked = {"validation": search.validation, "seeds": list(search.seeds), "trials": search.trials}
    refine = {"refine": search.refine} if search.refine else {}
    return {**asked, **refine, "preset": search.preset, "methods": spaces}


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
