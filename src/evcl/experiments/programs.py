"""Group cells into programs, whose cells train side by side as replicas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from evcl._core.settings import Settings
from evcl.benchmarks import BENCHMARKS
from evcl.experiments.config import Config
from evcl.experiments.resume import describe


def bundle(cells: Sequence[Config], replicas: int) -> list[list[int]]:
    """The cells of each program, at most `replicas` of them: configurations of one shape with the same seeds.

    A program's cells are ordered by configuration, and within each configuration by the same order of seeds.
    """
    if replicas == 1:
        return [[i] for i in range(len(cells))]
    groups = _by_configuration(cells, replicas)
    configs = [replace(cells[group[0]], seeds=tuple(cells[i].seed for i in group)) for group in groups]
    return [[i for g in program for i in groups[g]] for program in programs(configs, replicas)]


def _by_configuration(cells: Sequence[Config], most: int) -> list[list[int]]:
    """Groups of cells that differ only in their seed, at most `most` per group."""
    groups: dict[tuple[str, str], list[list[int]]] = {}
    for i, cell in enumerate(cells):
        about = json.dumps(describe(replace(cell, seeds=())), sort_keys=True)
        same = groups.setdefault((cell.preset, about), [[]])
        if len(same[-1]) == most:
            same.append([])
        same[-1].append(i)
    return [group for same in groups.values() for group in same]


def programs(configs: Sequence[Config], replicas: int) -> list[list[int]]:
    """Groups of configurations that can share a program of at most `replicas` replicas: those that differ only in
    real-valued settings.
    """
    found: list[tuple[Any, list[int]]] = []
    for i, config in enumerate(configs):
        free = {name for name, value in config.settings.items() if isinstance(value, float) and name != "validation"}
        fixed = {name: None if name in free else value for name, value in config.settings.items()}
        key = (replace(config, settings=Settings({}), preset=""), fixed)
        alone = BENCHMARKS[config.benchmark].kind is not None  # it runs one configuration at a time
        for other, members in found:
            if other == key and not alone and (len(members) + 1) * len(config.seeds) <= replicas:
                members.append(i)
                break
        else:
            found.append((key, [i]))
    return [members for _, members in found]
