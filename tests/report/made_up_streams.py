"""Results of streams that nobody ran, with numbers that are easy to check."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from made_up import result
from msgspec.structs import replace

from evcl.experiments import merge
from evcl.experiments.result import prequential, summarise


def one_seed(method, benchmark, seed, level, rows, window, alarms, numbers, changes):
    """A measure that is at `level`, falls to half of it at row rows / 2, and comes back."""
    points = -(-rows // window)
    wave = 0.01 * np.sin(np.arange(points) * (3 + seed))
    course = np.where(np.arange(points) == points // 2, 0.5 * level, level + wave)
    names = ("rmse", "nll", "coverage") if numbers else ("accuracy", "nll", "brier", "ece", "kappa")
    curves = {name: (course if name in ("accuracy", "rmse") else 1 - course).tolist() for name in names}
    warned = [SimpleNamespace(row=row, surprise=5.0, columns=["rain", "<i>wind</i>"]) for row in alarms]
    block = prequential(rows, window, {name: float(np.mean(c)) for name, c in curves.items()}, curves, warned, changes)
    return replace(
        result(method, benchmark, last=(level,), seeds=[seed], tasks=1),
        accuracy=None,
        average_accuracy=summarise([None if numbers else level]),
        forgetting=summarise([None]),
        backward_transfer=summarise([None]),
        nll=summarise([None if numbers else 1 - level]),
        ece=summarise([None]),
        prequential=block,
    )


def stream(
    method="ekf", benchmark="weather", level=0.8, seeds=(0, 1), rows=1050, alarms=(530,), numbers=False, changes=()
):
    """The result of a stream with windows of 10 rows."""
    return merge([one_seed(method, benchmark, seed, level, rows, 10, alarms, numbers, changes) for seed in seeds])
