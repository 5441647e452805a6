"""Search for a method's settings: every method gets the same number of trials, evaluated on validation data only.

A TOML file defines the search. Its result is a JSON file per benchmark, with one line per trial, which also records the
date, the machine and the search itself:

    benchmarks = ["split-mnist", "permuted-mnist"]
    validation = 0.1            # fraction of each training set to hold out and evaluate on
    seeds = [100, 101, 102]
    trials = 32                 # per method; every benchmark gets the same ones
    preset = "tuned"            # gives the settings that are not searched [default]

    [methods.evcl]
    strength = {low = 1e-3, high = 1.0}     # sampled from this range, uniformly in its logarithm
    epochs = {choices = [20, 50, 100]}      # one of these values
    std_update = "natural"                  # fixed

The name of a table is that of its method, unless the table has `method = "evcl"`. Several tables of one name,
`[[methods.evcl]]`, are alternatives that share the method's trials; one that searches nothing takes a single trial. The
trials are points of a Sobol sequence, which cover a space evenly.

- `refine = 12` adds 12 trials per method and benchmark. They cover a quarter of each range (of its logarithm) around
  the best trial so far, with the choices of that trial.
- `after = ["earlier"]` lists earlier searches in the same folder, whose trials count too.
- `confirm = 4` with `confirm_seeds = [...]` runs the four best trials of each method again, with those seeds, and
  chooses by these runs alone: the best of many trials is partly the luckiest.

A sweep: a TOML file defines benchmarks, methods, settings and seeds, and every combination of them is one cell.

    benchmarks = ["split-digits", "permuted-digits:3"]      # a name, or a name and the number of tasks
    seeds = 5                                               # 0 to 4; or a list of seeds
    preset = "tuned"                                        # gives the settings that are not listed here
    draws = 20                                              # number of random draws of the settings below

    [settings]                                              # for every method
    epochs = 10

    [methods.evcl]
    strength = [0.01, 0.1, 1]                               # a grid: each of these values
    lr = {low = 1e-4, high = 1e-2}                          # drawn from this range, uniformly in its logarithm
    fisher = {choices = ["exact", "sampled"]}               # drawn from these values

    [methods.long]                                          # the same method again, under another name
    method = "evcl"
    epochs = 100

A draw chooses all drawn settings of a table together, as one point of a Sobol sequence. Every combination of the grids
gets the same draws. Methods without settings of their own can be a list: `methods = ["evcl", "vcl"]`.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct
from msgspec.structs import asdict
from msgspec.structs import replace as replaced

from evcl._core.bounds import MOST_CELLS, MOST_RESULT_BYTES, MOST_TRIALS
from evcl._core.errors import EvclError, brief
from evcl._core.files import in_lines, parsed, read_text, write_atomically
from evcl._core.settings import RENAMED, renamed
from evcl.benchmarks import BENCHMARKS, check_tasks
from evcl.experiments.config import MOST_SEEDS, Config, configure, where
from evcl.experiments.config_file import NameList, Seed, Space, Spaces, at_key, checked, read_config
from evcl.experiments.parallel import MakeEngine, execute_all
from evcl.experiments.run import Event
from evcl.experiments.store import Store

Trial = Mapping[str, Any]  # the keys settings, mean, std and per_seed; the last three describe the score
Found = Mapping[str, Any]  # the contents of the result file of a search

MAX_RANGE = 1e300  # of a range that is drawn from


class Search(Struct, frozen=True, kw_only=True):
    """The contents of a search file."""

    benchmarks: NameList
    validation: Annotated[float, Meta(gt=0, lt=1)]
    seeds: Annotated[tuple[Seed, ...], Meta(min_length=1, max_length=MOST_SEEDS)]
    trials: Annotated[int, Meta(ge=1, le=1_000)]
    preset: str = "default"
    refine: Annotated[int, Meta(ge=0, le=1_000)] = 0
    after: Annotated[tuple[str, ...], Meta(max_length=100)] = ()  # after reading: paths without .toml
    confirm: Annotated[int, Meta(ge=0, le=1_000)] = 0
    confirm_seeds: Annotated[tuple[Seed, ...], Meta(max_length=MOST_SEEDS)] = ()
    methods: Spaces  # for each method a table, or a list of tables

    @property
    def spaces(self) -> dict[str, list[Space]]:
        """Maps each method to its alternative spaces."""
        return {name: each if isinstance(each, list) else [each] for name, each in self.methods.items()}


def read_search(path: Path) -> Search:
    """Read a search from a TOML file, and check it."""
    search = read_config(path, Search)
    for name, each in search.methods.items():
        checked(each, Space | list[Space], f"{path}: methods.{name}")
    for name, each in search.spaces.items():
        if len({str(space.get("method", name)) for space in each}) != 1 or len(each) > search.trials:
            raise EvclError(f"{path}: methods.{name}: its tables must be for one method, and no more than its trials")
    if bool(search.confirm) != bool(search.confirm_seeds) or set(search.confirm_seeds) & set(search.seeds):
        raise EvclError(f"{path}: confirm: needs confirm_seeds, none of which may be in seeds, {list(search.seeds)}")
    cells = search.trials * len(search.methods) * len(search.benchmarks)
    if cells > MOST_TRIALS:
        raise EvclError(f"{path}: trials: {cells:,} for all methods and benchmarks, but the maximum is {MOST_TRIALS:,}")
    for benchmark in search.benchmarks:
        with at_key(path, ("benchmarks", ())):
            named_tasks(benchmark)
        for method, spaces in search.spaces.items():  # raises if a trial is not a valid configuration
            own = {name for space in spaces for name in space}
            with at_key(path, (f"methods.{method}", own), ("", Search.__struct_fields__)):
                for settings in trials(search, method):
                    _config(search, benchmark, method, settings, "cpu", None)
    return replaced(search, after=tuple(str(path.parent / name) for name in search.after))


def trials(search: Search, method: str) -> list[Space]:
    """The settings of a method's trials: one for each alternative that searches nothing; the others share the rest."""
    spaces = search.spaces[method]
    searching = sum(bool(_searched(space)) for space in spaces)
    share, more = divmod(search.trials - (len(spaces) - searching), searching or 1)
    shares = iter([share + (i < more) for i in range(searching)])
    return [trial for space in spaces for trial in points(space, next(shares) if _searched(space) else 1, 0)]


def refinement(search: Search, method: str, tried: Sequence[Trial]) -> list[Space]:
    """The settings of `refine` more trials, around the best of those tried that lie in the method's spaces."""
    for trial in tried:
        for space in search.spaces[method]:
            if _fits(space, trial["settings"]):
                return points(_near(space, trial["settings"]), search.refine, 1)
    raise ValueError("none of the trials lies in the spaces of this search")


def points(space: Space, count: int, seed: int) -> list[Space]:
    """`count` points that cover a space evenly; a single one if no setting is searched."""
    space = {name: value for name, value in space.items() if name != "method"}
    searched = _searched(space)
    if not searched:
        return [dict(space)]
    sampled = []
    for point in torch.quasirandom.SobolEngine(len(searched), scramble=True, seed=seed).draw(count).tolist():
        chosen = {name: _value(name, space[name], at) for name, at in zip(searched, point, strict=True)}
        sampled.append({name: chosen.get(name, value) for name, value in space.items()})
    return sampled


def _searched(space: Space) -> list[str]:
    """The settings of a space that have several values."""
    return [name for name, value in space.items() if isinstance(value, dict)]


def _fits(space: Space, settings: Space) -> bool:
    """Whether these settings lie in a space."""

    def inside(value: Any, spec: Any) -> bool:
        if not isinstance(spec, dict):
            return bool(value == spec)
        if "choices" in spec:
            return value in spec["choices"]
        return not isinstance(value, str) and bool(spec["low"] <= value <= spec["high"])

    named = {name: spec for name, spec in space.items() if name != "method"}
    return named.keys() == settings.keys() and all(inside(settings[name], spec) for name, spec in named.items())


def _near(space: Space, best: Space) -> Space:
    """A space with a quarter of each range, around the best settings."""

    def narrowed(name: str, value: Any) -> Any:
        if not isinstance(value, dict) or "choices" in value:
            return best.get(name, value)
        away = (value["high"] / value["low"]) ** 0.125
        return {"low": max(value["low"], best[name] / away), "high": min(value["high"], best[name] * away)}

    return {name: narrowed(name, value) for name, value in space.items()}


def _number(value: object) -> int | float:
    """The number that a file gives as an end of a range; 0, which is no end, for anything else."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0


def _value(name: str, spec: Space, at: float) -> object:
    """The value of a setting at a point between 0 and 1 of its range."""
    if isinstance(spec.get("choices"), list) and spec["choices"]:
        return spec["choices"][min(int(at * len(spec["choices"])), len(spec["choices"]) - 1)]
    low, high = _number(spec.get("low")), _number(spec.get("high"))
    if not 0 < low < high <= MAX_RANGE:
        wanted = f"a value, {{choices = [...]}} or {{low = ..., high = ...}} with 0 < low < high <= {MAX_RANGE:g}"
        raise EvclError(f"{name} must be {wanted}, not {brief(dict(spec))}", setting=name)
    value = math.exp(math.log(low) + at * math.log(high / low))
    return min(max(float(f"{value:.3g}"), low), high)


def named_tasks(text: str) -> tuple[str, int | None]:
    """Parse and check a benchmark's name with an optional number of tasks: permuted-mnist, or permuted-mnist:10."""
    name, _, tasks = text.partition(":")
    if tasks and not (tasks.isascii() and tasks.isdecimal() and len(tasks) < 10):
        raise EvclError(f"expected a benchmark, or one with its number of tasks (permuted-mnist:10), not {text!r}")
    count = int(tasks) if tasks else None
    check_tasks(BENCHMARKS[name], count)
    return name, count


def _config(search: Search, benchmark: str, method: str, settings: Space, device: str, precision: str | None) -> Config:
    name, tasks = named_tasks(benchmark)
    of = search.spaces[method][0].get("method", method)
    given = {**settings, "validation": search.validation}
    device, precision = where(device, precision, elsewhere=True)
    return replace(configure(name, of, search.preset, search.seeds, tasks, given), device=device, precision=precision)


def tune(
    search: Search,
    benchmark: str,
    device: str = "cpu",
    precision: str | None = None,
    on_event: Callable[[int, Event], None] = lambda i, event: None,
    store: Store | None = None,
    engine: MakeEngine | None = None,
) -> Found:
    """Run every method's trials on one benchmark; returns the contents of the result file, best trials first.

    With a `store`, a search that was stopped resumes, and several processes can share it.
    """
    start = time.perf_counter()
    begun = 0
    machine: Mapping[str, object] = {}

    def measure(wanted: Mapping[str, Sequence[Space]], over: Search = search) -> dict[str, list[Trial]]:
        """Run trials with these settings; returns them best first."""
        nonlocal begun, machine
        each = [(method, settings) for method, some in wanted.items() for settings in some]
        configs = [_config(over, benchmark, method, settings, device, precision) for method, settings in each]
        before, begun = begun, begun + len(each)
        if store is not None:
            store.declare(cell for config in configs for cell in config.cells)
        results = dict(
            execute_all(
                configs, lambda i, event: on_event(before + i, event), allow_divergence=True, store=store, engine=engine
            )
        )
        machine = asdict(results[0].environment)
        made: dict[str, list[Trial]] = {method: [] for method in wanted}
        for i, (method, settings) in enumerate(each):
            made[method].append({"settings": settings, **asdict(results[i].measure(results[i].score))})
        return {method: _ranked(some) for method, some in made.items()}

    earlier = _earlier(search, benchmark)
    tried = measure({method: trials(search, method) for method in search.spaces})
    if search.refine:
        near = {method: refinement(search, method, _ranked(earlier[method] + tried[method])) for method in tried}
        for method, more in measure(near).items():
            tried[method] = _ranked(tried[method] + more)
    confirmed = {}
    if search.confirm:
        best = {method: _ranked(earlier[method] + tried[method])[: search.confirm] for method in tried}
        wanted = {method: [trial["settings"] for trial in some] for method, some in best.items()}
        confirmed = {"confirmed": measure(wanted, replaced(search, seeds=search.confirm_seeds))}
    return {
        "benchmark": benchmark,
        **_asked(search),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.perf_counter() - start, 1),
        "environment": machine,
        **confirmed,
        "tried": tried,
    }


def _ranked(some: Sequence[Trial]) -> list[Trial]:
    """Sort trials, best first. Settings that were tried twice are listed once."""
    ranked = sorted(some, key=lambda trial: math.inf if trial["mean"] is None else -trial["mean"])
    return list({json.dumps(trial["settings"], sort_keys=True): trial for trial in reversed(ranked)}.values())[::-1]


def _earlier(search: Search, benchmark: str) -> dict[str, list[Trial]]:
    """The trials of the searches listed in `after`."""
    tried: dict[str, list[Trial]] = {method: [] for method in search.spaces}
    for name in search.after:
        before = read_found(Path(name, result_name(benchmark)), read_search(Path(f"{name}.toml")))
        for method in tried:
            tried[method] += before["tried"].get(method, [])
    return tried


def result_name(benchmark: str) -> str:
    """The name of a search's result file for a benchmark."""
    return f"{benchmark.replace(':', '-')}.json"


def best_trial(found: Found, method: str) -> Trial:
    """The trial that a search chooses for a method: the best of the confirmed ones, or of all without `confirm`."""
    trial: Trial = found.get("confirmed", found["tried"])[method][0]
    return trial


def _asked(search: Search) -> dict[str, object]:
    """The description of a search in its result file."""
    named = {method: [renamed(space) for space in each] for method, each in search.spaces.items()}
    spaces = {method: each[0] if len(each) == 1 else each for method, each in named.items()}
    spec = {"validation": search.validation, "seeds": list(search.seeds), "trials": search.trials}
    more = {"refine": search.refine, "after": [Path(name).name for name in search.after], "confirm": search.confirm}
    more |= {"confirm_seeds": list(search.confirm_seeds)}
    return {**spec, **{key: value for key, value in more.items() if value}, "preset": search.preset, "methods": spaces}


def write_found(path: Path, found: Found) -> None:
    """Write the result of `tune` atomically, with one line per trial."""
    depths = {"methods": 1, "confirmed": 2, "tried": 2}
    lines = ",\n".join(f' "{key}": {in_lines(value, depths.get(key, 0), " ")}' for key, value in found.items())

    def write(temporary: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(f"{{\n{lines}\n}}\n", "utf-8")

    write_atomically(path, write)


def read_found(path: Path, search: Search) -> Found:
    """Read a result that `tune` wrote; raises if it is not a result of this search."""
    try:
        text = read_text(path, MOST_RESULT_BYTES)
        for old, new in RENAMED.items():
            text = text.replace(f'"{old}"', f'"{new}"')
        result = dict(parsed(text))
        same = {key: result[key] for key in _asked(search)} == _asked(search)
        result["tried"], result["benchmark"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EvclError(f"{path} is not the result of a search: pass --overwrite or another --out") from error
    if not same:
        raise EvclError(f"{path} holds the result of another search: pass --overwrite or another --out")
    return result


# --- sweeps ----------------------------------------------------------------------------------------------------------


class Sweep(Struct, frozen=True, kw_only=True):
    """The contents of a sweep file."""

    benchmarks: NameList
    seeds: (
        Annotated[int, Meta(ge=1, le=MOST_SEEDS)]
        | Annotated[tuple[Seed, ...], Meta(min_length=1, max_length=MOST_SEEDS)]
    ) = 3
    preset: str = "tuned"
    draws: Annotated[int, Meta(ge=0, le=10_000)] = 0
    settings: Space = {}
    methods: NameList | Spaces


def read_sweep(path: Path, device: str = "cpu", precision: str = "fp32") -> list[Config]:
    """Read a sweep file, and return its cells for this device: checked configurations of one seed each."""
    sweep = read_config(path, Sweep)
    seeds = range(sweep.seeds) if isinstance(sweep.seeds, int) else tuple(dict.fromkeys(sweep.seeds))
    with at_key(path, ("benchmarks", ())):
        streams = [named_tasks(each) for each in sweep.benchmarks]
    tables = sweep.methods if isinstance(sweep.methods, dict) else {name: {} for name in sweep.methods}
    cells: list[Config] = []
    for (benchmark, tasks), (table, own) in itertools.product(streams, tables.items()):
        checked(own, Space, f"{path}: methods.{table}")
        space = {**sweep.settings, **own}
        with at_key(path, (f"methods.{table}", own), ("settings", sweep.settings), ("", Sweep.__struct_fields__)):
            if len(cells) + len(seeds) * _count(space, sweep.draws) > MOST_CELLS:
                raise EvclError(f"more than {MOST_CELLS:,} cells: divide it into several sweeps")
            for point in _combinations(space, sweep.draws):
                config = configure(benchmark, space.get("method", table), sweep.preset, seeds, tasks, point)
                cells += replace(config, device=device, precision=precision).cells
    return cells


def _count(space: Space, draws: int) -> int:
    """How many combinations there are."""
    grids = math.prod(len(value) for value in space.values() if isinstance(value, list))
    return grids * (draws if any(isinstance(value, dict) for value in space.values()) else 1)


def _combinations(space: Space, draws: int) -> Iterator[Space]:
    """Yield every combination of the grids' values with the draws."""
    grids = {name: value for name, value in space.items() if isinstance(value, list)}
    drawn = {name: value for name, value in space.items() if isinstance(value, dict)}
    for name, grid in grids.items():
        if not grid:
            raise EvclError("a grid needs at least one value", setting=name)
    for name in drawn:
        if not draws:
            raise EvclError("is drawn at random: set the number of draws, for example draws = 20", setting=name)
    fixed = {name: value for name, value in space.items() if name != "method" and name not in grids | drawn}
    some = points(drawn, draws, 0)
    for values in itertools.product(*grids.values()):
        for point in some:
            yield fixed | dict(zip(grids, values, strict=True)) | point
