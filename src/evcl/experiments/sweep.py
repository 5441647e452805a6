"""A sweep: a TOML file defines benchmarks, methods, settings and seeds, and every combination of them is one cell.

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
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from evcl._core.bounds import MOST_CELLS
from evcl._core.errors import EvclError
from evcl.experiments.config import MOST_SEEDS, Config, configure
from evcl.experiments.config_file import NameList, Seed, Space, Spaces, at_key, checked, read_config
from evcl.experiments.search import named_tasks, points


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
    grids = prod(len(value) for value in space.values() if isinstance(value, list))
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
