"""Results that nobody trained, with numbers that are easy to check."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from evcl import metrics
from evcl.experiments import Environment, Result
from evcl.experiments.result import SCORES, summarise, to_json

MACHINE = Environment(evcl="0.1.0", torch="2.13.0", device="cpu", threads=1, platform="somewhere")


def matrix(last, tasks, joint):
    """Every task starts at 0.9 and falls in equal steps to `last` by the end; joint training has its last row only."""
    found = np.full((tasks, tasks), np.nan)
    for t in range(tasks):
        for k in range(t + 1):
            found[t, k] = last if t == tasks - 1 else 0.9 - (0.9 - last) * (t - k) / tasks
    if joint:
        found[:-1] = np.nan
    return found


def result(
    method="evcl", benchmark="split-mnist", last=(0.80, 0.82, 0.84), seeds=None, tasks=5, preset="tuned", **config
):
    """A result whose average accuracy is `last`, a value a seed."""
    matrices = [matrix(value, tasks, method == "joint") for value in last]
    usual = {"epochs": 2, "validation": 0.0, "tasks": tasks, "hidden": [8], "precision": "fp32", "device": "cpu"}
    return Result(
        benchmark=benchmark,
        method=method,
        preset=preset,
        config=usual | config,
        seeds=list(range(len(last))) if seeds is None else list(seeds),
        accuracy=[[[None if np.isnan(v) else v for v in row] for row in m.tolist()] for m in matrices],
        average_accuracy=summarise([metrics.average_accuracy(m) for m in matrices]),
        forgetting=summarise([metrics.forgetting(m) for m in matrices]),
        backward_transfer=summarise([metrics.backward_transfer(m) for m in matrices]),
        nll=summarise([1 - value for value in last]),
        ece=summarise([(1 - value) / 10 for value in last]),
        seconds=1.234,
        environment=MACHINE,
    )


def with_bins(one, memory=100_000):
    """The result with reliability bins, whose predictions are 5 points too sure, and with a size."""
    bins = [(1 / 15, (b + 0.5) / 15, max(0.0, (b + 0.5) / 15 - 0.05)) for b in range(15)]
    return replace(one, reliability=[bins] * len(one.seeds), memory_bytes=memory)


def generative(method="evcl", last=(-90.0, -91.0), tasks=3, score="log_likelihood", **config):
    """A result that is judged by something other than accuracy: every task falls from -80 to `last`."""
    plain = result(method, "characters", [0.5] * len(last), tasks=tasks, **config)
    matrices = [np.full((tasks, tasks), np.nan) for _ in last]
    for found, value in zip(matrices, last, strict=True):
        for t in range(tasks):
            found[t, : t + 1] = value if t == tasks - 1 else -80.0
    none = summarise([None] * len(last))
    listed = [[[None if np.isnan(v) else v for v in row] for row in m.tolist()] for m in matrices]
    return replace(
        plain,
        accuracy=None,
        average_accuracy=none,
        forgetting=summarise([metrics.forgetting(m) for m in matrices]),
        backward_transfer=summarise([metrics.backward_transfer(m) for m in matrices]),
        nll=none,
        ece=none,
        **{
            score: summarise([metrics.average_accuracy(m) for m in matrices]),
            SCORES[score].matrices: listed,
        },
    )


def write(folder, *results):
    for number, one in enumerate(results):
        place = folder / f"{number}"
        place.mkdir(parents=True)
        (place / "result.json").write_text(to_json(one), "utf-8")
    return folder
