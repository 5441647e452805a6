"""A sweep: every combination of benchmarks, methods, settings and seeds that a TOML file asks for.

    benchmarks = ["split-digits", "permuted-digits:3"]      # a name, or a name and how many tasks
    seeds = 5                                               # 0 to 4; or a list
    preset = "tuned"                                        # where what is not said comes from
    draws = 20                                              # how often what is drawn is drawn

    [settings]                                              # of every method
    epochs = 10

    [methods.evcl]
    strength = [0.01, 0.1, 1]                               # a grid: every one
    lr = {low = 1e-4, high = 1e-2}                          # drawn, evenly by logarithm
    fisher = {choices = ["exact", "sampled"]}               # drawn

    [methods.long]                                          # a table of another name says which method
    method = "evcl"
    epochs = 100

What is drawn is drawn together, as points of a Sobol sequence, the same for every combination of the grids. Without
settings of their own, methods are a list: `methods = ["evcl", "vcl"]`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from evcl import methods
from evcl._core.errors import EvclError, unknown
from evcl.experiments.config_file import ConfigFile
from evcl.experiments.presets import SUMMARIES
from evcl.experiments.run import MOST_SEEDS, Config, configure
from evcl.experiments.search import named_tasks, points

MOST_CELLS, MOST_DRAWS = 100_000, 10_000
KEYS = ("benchmarks", "seeds", "preset", "draws", "settings", "methods")
Space = Mapping[str, Any]  # setting -> value, grid, range or choices


def read_sweep(path: Path, device: str = "cpu", precision: str = "fp32") -> list[Config]:
    """The cells of a sweep, each a configuration of one seed, checked; they are to run on this device."""
    file = ConfigFile(path)
    found = file.values
    for name in found:
        if name not in KEYS:
            file.bad((name,), str(unknown("key", name, KEYS)))
    streams, seeds, spaces = _streams(file), _seeds(file), _spaces(file)
    preset = found.get("preset", "tuned")
    if not isinstance(preset, str) or preset not in SUMMARIES:
        file.bad(("preset",), str(unknown("preset", str(preset), SUMMARIES)))
    cells: list[Config] = []
    for (benchmark, tasks), (table, space) in itertools.product(streams, spaces.items()):
        method = _method(file, table, space)
        for point in _combinations(file, table, space):
            try:
                config = configure(benchmark, method, preset, seeds, tasks, point)
            except EvclError as error:
                about = error.setting if error.setting in point else None
                file.bad(("methods", table) if about is None else _where(file, table, about), str(error))
            cells += replace(config, device=device, precision=precision).cells
            if len(cells) > MOST_CELLS:
                raise EvclError(f"{path} asks for more than {MOST_CELLS} cells: make several sweeps of it")
    return cells


def _streams(file: ConfigFile) -> list[tuple[str, int | None]]:
    """Benchmarks, and how many tasks of each."""
    found = []
    for each in _names(file, "benchmarks"):
        try:
            found.append(named_tasks(each))
        except EvclError as error:
            file.bad(("benchmarks",), str(error))
    return found


def _names(file: ConfigFile, key: str) -> list[str]:
    names = file.values.get(key)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        file.bad((key,), f"must be a list of names, one or more, not {names!r}")
    return names


def _whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _seeds(file: ConfigFile) -> list[int]:
    seeds = file.values.get("seeds", 3)
    if _whole(seeds, 1, MOST_SEEDS):
        return list(range(seeds))
    if not isinstance(seeds, list) or not seeds or not all(_whole(seed, 0, 2**63 - 1) for seed in seeds):
        file.bad(("seeds",), f"must be a number from 1 to {MOST_SEEDS} or a list of whole numbers, not {seeds!r}")
    return list(dict.fromkeys(seeds))


def _spaces(file: ConfigFile) -> dict[str, Space]:
    """By table: the settings of all methods with its own in their place."""
    shared, tables = file.values.get("settings", {}), file.values.get("methods")
    if isinstance(tables, list):
        tables = {name: {} for name in _names(file, "methods")}
    if not isinstance(tables, dict) or not tables:
        file.bad(("methods",), f"must be a table for each method, or a list of names, not {tables!r}")
    for key, space in ((("settings",), shared), *((("methods", name), each) for name, each in tables.items())):
        if not isinstance(space, dict):
            file.bad(key, f"must be a table of settings, not {space!r}")
    return {name: {**shared, **space} for name, space in tables.items()}


def _method(file: ConfigFile, table: str, space: Space) -> str:
    method = space.get("method", table)
    if not isinstance(method, str) or method not in methods.METHODS:
        file.bad(("methods", table), str(unknown("method", str(method), methods.METHODS)))
    return method


def _combinations(file: ConfigFile, table: str, space: Space) -> Iterator[dict[str, Any]]:
    """Every combination of the grids with everything that is drawn."""
    draws = file.values.get("draws", 0)
    if not _whole(draws, 0, MOST_DRAWS):
        file.bad(("draws",), f"must be a whole number, at most {MOST_DRAWS}, not {draws!r}")
    grids = {name: value for name, value in space.items() if isinstance(value, list)}
    drawn = {name: value for name, value in space.items() if isinstance(value, dict)}
    for name, value in (grids | drawn).items():
        message = "a grid needs one value or more" if not value else ""
        if name in drawn and not draws:
            message = "is drawn: say how often, draws = 20"
        try:
            points({name: value}, 1, 0)
        except EvclError as error:
            message = message or str(error)
        if message:
            file.bad(_where(file, table, name), message)
    fixed = {name: value for name, value in space.items() if name != "method" and name not in grids | drawn}
    some = points(drawn, draws, 0)
    for values in itertools.product(*grids.values()):
        for point in some:
            yield fixed | dict(zip(grids, values, strict=True)) | point


def _where(file: ConfigFile, table: str, name: str) -> tuple[str, ...]:
    """Where a method's setting is said."""
    tables = file.values["methods"]
    own = isinstance(tables, dict) and name in tables[table]
    return ("methods", table, name) if own else ("settings", name)
