"""Shared by the programs of this folder: the networks that they measure, and how they measure time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from evcl._core.settings import Settings, resolve
from evcl.methods import METHODS

BATCH = 256
NETWORKS = {"split-mnist": ([256, 256], 2), "permuted-mnist": ([100, 100], 10)}  # hidden layers and classes


def paper_form(method: str, **given: Any) -> Settings:
    """A method's settings with Adam for sigma and an unscaled Fisher: the form whose steps are measured here."""
    known = METHODS[method].known_settings
    plain = {"lr": 0.005, "std_update": "adam", "fisher_temperature": 1.0, "fisher_scale": "none"}
    return resolve(method, known, {**{name: value for name, value in plain.items() if name in known}, **given})


def timed(run: Callable[[], object], repeats: int = 1) -> float:
    """Seconds per call."""
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def medians(runs: Sequence[Callable[[], object]], rounds: int, repeats: int = 1) -> list[float]:
    """Seconds per call of each function: the median over rounds that time all in turn, so that other load slows all.

    A round before those lets each find its caches and buffers.
    """
    found = [[timed(run, repeats) for run in runs] for _ in range(rounds + 1)]
    return [statistics.median(column) for column in zip(*found[1:], strict=True)]


def plain_network(widths: Sequence[int]) -> nn.Sequential:
    """The network in plain torch, both trunk and head."""
    layers = [layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers[:-1])
