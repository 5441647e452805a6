"""A sweep: every combination of benchmarks, methods, settings and seeds that a TOML file asks for.

    benchmarks = ["split-digits", "permuted-digits:3"]      # a name, or a name and how many tasks
    seeds = 5                                               # 0 to 4; or a list
    preset = "tuned"                                        # where what is not said comes from
    draws = 20                                              # how often what is drawn is drawn

    [settings]                                              # of every method
    epochs = 10

    [methods.evcl]
    strength = [1, 10, 100]                                 # a grid: every one
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
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evcl import benchmarks, methods
from evcl.errors import EvclError, unknown
from evcl.experiments.presets import SUMMARIES
from evcl.experiments.run import Config, configure
from evcl.experiments.search import named_tasks, points
from evcl.experiments.store import HIDDEN, State, Store

MOST_CELLS, MOST_BYTES, MOST_DRAWS = 100_000, 1_000_000, 10_000
KEYS = ("benchmarks", "seeds", "preset", "draws", "settings", "methods")
Space = Mapping[str, Any]  # setting -> value, grid, range or choices


class _File:
    """A TOML file, and where in it something is said."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.stat().st_size > MOST_BYTES:
                raise EvclError(f"{path} is larger than {MOST_BYTES} bytes: that is no sweep")
            self.text = path.read_text("utf-8")
            self.found = tomllib.loads(self.text)
        except EvclError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise EvclError(f"{path} cannot be read as TOML: {error}") from error

    def line(self, table: str, name: str) -> int | None:
        """The line that sets a key of a table, or that begins the table; None if it is not written that plainly."""
        inside, header = "", None
        for number, line in enumerate(self.text.splitlines(), 1):
            if found := re.match(r"\s*\[\[?\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$", line):
                inside = found[1].replace('"', "").replace("'", "")
                header = number if inside == f"{table}.{name}".lstrip(".") else header
            elif inside == table and re.match(rf"""\s*["']?{re.escape(name)}["']?\s*=""", line):
                return number
        return header

    def error(self, table: str, name: str, message: str) -> EvclError:
        line = self.line(table, name)
        where = str(self.path) if line is None else f"{self.path}, line {line}"
        return EvclError(f"{where}: {f'{table}.{name}'.lstrip('.')}: {message}")


def read_sweep(path: Path, device: str = "cpu", precision: str = "fp32") -> list[Config]:
    """The cells of a sweep, each a configuration of one seed, checked; they are to run on this device."""
    file = _File(path)
    found = file.found
    for name in found:
        if name not in KEYS:
            raise file.error("", name, str(unknown("key", name, KEYS)))
    streams, seeds, spaces = _streams(file), _seeds(file), _spaces(file)
    preset = found.get("preset", "tuned")
    if preset not in SUMMARIES:
        raise file.error("", "preset", str(unknown("preset", str(preset), SUMMARIES)))
    cells: list[Config] = []
    for (benchmark, tasks), (table, space) in itertools.product(streams, spaces.items()):
        method = _method(file, table, space)
        for point in _combinations(file, table, space):
            try:
                config = configure(benchmark, method, preset, seeds, tasks, point)
            except (EvclError, TypeError) as error:
                raise _blamed(file, table, point, str(error)) from None
            cells += [replace(config, seeds=(seed,), device=device, precision=precision) for seed in config.seeds]
            if len(cells) > MOST_CELLS:
                raise EvclError(f"{path} asks for more than {MOST_CELLS} cells: make several sweeps of it")
    return cells


def _streams(file: _File) -> list[tuple[str, int | None]]:
    """Benchmarks, and how many tasks of each."""
    found = []
    for each in _names(file, "benchmarks"):
        try:
            name, tasks = named_tasks(each)
            benchmarks.check_tasks(benchmarks.BENCHMARKS[name], tasks)
        except EvclError as error:
            raise file.error("", "benchmarks", str(error)) from None
        found.append((name, tasks))
    return found


def _names(file: _File, key: str) -> list[str]:
    names = file.found.get(key)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise file.error("", key, f"must be a list of names, one or more, not {names!r}")
    return names


def _whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _seeds(file: _File) -> list[int]:
    seeds = file.found.get("seeds", 3)
    if _whole(seeds, 1, 10_000):
        return list(range(seeds))
    if isinstance(seeds, list) and seeds and all(_whole(seed, 0, 2**63 - 1) for seed in seeds):
        return list(dict.fromkeys(seeds))
    raise file.error("", "seeds", f"must be a number from 1 to 10000 or a list of whole numbers, not {seeds!r}")


def _spaces(file: _File) -> dict[str, Space]:
    """By table: the settings of all methods with its own in their place."""
    shared, tables = file.found.get("settings", {}), file.found.get("methods")
    if isinstance(tables, list):
        tables = {name: {} for name in _names(file, "methods")}
    if not isinstance(tables, dict) or not tables:
        raise file.error("", "methods", f"must be a table for each method, or a list of names, not {tables!r}")
    for table, name, space in (("", "settings", shared), *(("methods", name, each) for name, each in tables.items())):
        if not isinstance(space, dict):
            raise file.error(table, name, f"must be a table of settings, not {space!r}")
    return {name: {**shared, **space} for name, space in tables.items()}


def _method(file: _File, table: str, space: Space) -> str:
    method = space.get("method", table)
    if not isinstance(method, str) or method not in methods.METHODS:
        raise file.error("methods", table, str(unknown("method", str(method), methods.METHODS)))
    return method


def _combinations(file: _File, table: str, space: Space) -> Iterator[dict[str, Any]]:
    """Every combination of the grids with everything that is drawn."""
    draws = file.found.get("draws", 0)
    if not _whole(draws, 0, MOST_DRAWS):
        raise file.error("", "draws", f"must be a whole number, at most {MOST_DRAWS}, not {draws!r}")
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
            raise file.error(_where(file, table, name), name, message)
    fixed = {name: value for name, value in space.items() if name != "method" and name not in grids | drawn}
    some = points(drawn, draws, 0)
    for values in itertools.product(*grids.values()):
        for point in some:
            yield fixed | dict(zip(grids, values, strict=True)) | point


def _where(file: _File, table: str, name: str) -> str:
    """The table that a method's setting is said in."""
    tables = file.found["methods"]
    return f"methods.{table}" if isinstance(tables, dict) and name in tables[table] else "settings"


def _blamed(file: _File, table: str, point: Mapping[str, Any], message: str) -> EvclError:
    """The error at the setting that its message names."""
    for name in point:
        if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message):
            return file.error(_where(file, table, name), name, message)
    return file.error("methods", table, message)


# --- where a sweep stands -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """A declared cell, where it stands, its average accuracy if it is done, and its message if it failed."""

    cell: Mapping[str, Any]
    state: State
    accuracy: float | None = None
    message: str = ""


def standing(folder: Path) -> list[Standing]:
    """Where every cell of a folder stands."""
    store = store_in(folder)
    found = []
    for key, cell in store.declared().items():
        state = store.look(key)
        accuracy, message = None, ""
        if state.kind == "done":
            accuracy = store.accuracy(key)
        elif state.kind == "failed":
            message = store.failure(key, state.claims).message
        found.append(Standing(cell, state, accuracy, message))
    return found


def store_in(folder: Path) -> Store:
    """The store of a folder: of a sweep, or of what `reproduce` and `tune` keep beside their results."""
    for place in (folder, folder / HIDDEN):
        if (place / "sweeps").is_dir():
            return Store(place)
    raise EvclError(f"{folder} holds no sweep: make one with evcl sweep FILE.toml --out {folder}")


def varied(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which settings are not the same in all cells that have them."""
    values: dict[str, set[Any]] = {}
    for cell in cells:
        for name, value in cell["settings"].items():
            values.setdefault(name, set()).add(value)
    return [name for name, each in values.items() if len(each) > 1]
