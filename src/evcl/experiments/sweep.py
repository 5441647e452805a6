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
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from evcl._core.errors import EvclError
from evcl.experiments.config_file import Names, Seed, Space, Spaces, at_key, checked, read_config
from evcl.experiments.run import MOST_SEEDS, Config, configure
from evcl.experiments.search import named_tasks, points

MOST_CELLS = 100_000


class Sweep(Struct, frozen=True, kw_only=True):
    """What a sweep file may say."""

    benchmarks: Names
    seeds: (
        Annotated[int, Meta(ge=1, le=MOST_SEEDS)]
        | Annotated[tuple[Seed, ...], Meta(min_length=1, max_length=MOST_SEEDS)]
    ) = 3
    preset: str = "tuned"
    draws: Annotated[int, Meta(ge=0, le=10_000)] = 0
    settings: Space = {}
    methods: Names | Spaces


def read_sweep(path: Path, device: str = "cpu", precision: str = "fp32") -> list[Config]:
    """The cells of a sweep, each a configuration of one seed, checked; they are to run on this device."""
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
            for point in _combinations(space, sweep.draws):
                config = configure(benchmark, space.get("method", table), sweep.preset, seeds, tasks, point)
                cells += replace(config, device=device, precision=precision).cells
                if len(cells) > MOST_CELLS:
                    raise EvclError(f"more than {MOST_CELLS:,} cells so far: make several sweeps of it")
    return cells


def _combinations(space: Space, draws: int) -> Iterator[Space]:
    """Every combination of the grids with everything that is drawn."""
    grids = {name: value for name, value in space.items() if isinstance(value, list)}
    drawn = {name: value for name, value in space.items() if isinstance(value, dict)}
    for name, grid in grids.items():
        if not grid:
            raise EvclError("a grid needs one value or more", setting=name)
    for name in drawn:
        if not draws:
            raise EvclError("is drawn: say how often, draws = 20", setting=name)
    fixed = {name: value for name, value in space.items() if name != "method" and name not in grids | drawn}
    some = points(drawn, draws, 0)
    for values in itertools.product(*grids.values()):
        for point in some:
            yield fixed | dict(zip(grids, values, strict=True)) | point
