"""Group cells into programs, whose cells train side by side as replicas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from evcl import methods
from evcl._core.settings import BAYESIAN, TRAINING, Setting
from evcl._core.summaries import BENCHMARK_SUMMARIES
from evcl.benchmarks import BENCHMARKS
from evcl.experiments.config import Config
from evcl.experiments.resume import describe
from evcl.methods.memory import has_models
from evcl.methods.together import kind


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
    """Groups of configurations that can share a program of at most `replicas` replicas: those whose methods are of one
    kind, and that differ only in real-valued settings and in text settings that only their methods read.

    A setting that one of the methods does not have does not separate them: EVCL and VCL train side by side.
    """
    found: list[tuple[Any, dict[str, Any], list[int]]] = []
    for i, config in enumerate(configs):
        if BENCHMARKS[config.benchmark].kind is not None:  # it runs one configuration at a time
            found.append((None, {}, [i]))
            continue
        method = methods.for_settings(methods.get(config.method), config.settings)
        apart = _shares_heads(config) and method.log_joint is not None  # it may get other heads than other methods
        chosen = (config.network, config.scenario, apart)
        where = (config.benchmark, config.tasks, config.seeds, config.device, config.precision)
        key = (*where, *chosen, config.settings.validation, *kind(method))
        each = {name: _shared(name, value, method.known_settings.get(name)) for name, value in config.settings.items()}
        if has_models(method.memory):  # a fit of second networks has one group of replicas
            each |= {name: value for name, value in config.settings.items() if isinstance(value, str)}
        fixed = {name: value for name, value in each.items() if value is not None}
        for other, known, members in found:
            agree = all(known.get(name, value) == value for name, value in fixed.items())
            if other == key and agree and (len(members) + 1) * len(config.seeds) <= replicas:
                known.update(fixed)
                members.append(i)
                break
        else:
            found.append((key, fixed, [i]))
    return [members for _, _, members in found]


def _shares_heads(config: Config) -> bool:
    """Whether several tasks may share a head. Those of a benchmark of the user's own may."""
    if config.scenario:
        return config.scenario != "task"
    return config.benchmark not in BENCHMARK_SUMMARIES or config.benchmark.startswith("permuted-")


def _shared(name: str, value: Any, setting: Setting | None) -> Any:
    """The part of a setting that all replicas of a program must share, or None: integers, text that training itself
    reads and, for a setting that may be "auto", whether it is a number.
    """
    auto = setting is not None and setting.auto
    if isinstance(value, str):
        return value if auto or name in TRAINING or name in BAYESIAN else None
    if isinstance(value, float):
        return "a number" if auto else None
    return value
