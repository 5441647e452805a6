"""What a run gives: the result of each of its cells, and the machine that computed it."""

from __future__ import annotations

import contextlib
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evcl import metrics
from evcl.experiments.config import Config
from evcl.experiments.result import Environment, Matrices, Result, Summary, binned, summarise
from evcl.experiments.samples import picture
from evcl.training import StreamResult


def environment(device: str) -> Environment:
    from evcl import __version__

    return Environment(
        evcl=__version__,
        torch=str(torch.__version__),
        device=torch.cuda.get_device_name() if device == "cuda" else _processor() + " mps" * (device == "mps"),
        threads=torch.get_num_threads(),
        platform=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    )


@cache
def _processor() -> str:
    """The CPU's name, as far as the platform reports it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "cpu"


def cell_result(
    cell: Config, machine: Environment, seconds: float, size: int | None, trunk: Mapping[str, object], **measures: Any
) -> Result:
    """The result of a cell, with these measures and no others. `size`: the bytes that it keeps; `trunk`: what its
    configuration says of the network.
    """
    of_cell = {"precision": cell.precision, "device": cell.device}
    of_cell |= {"scenario": cell.scenario} if cell.scenario else {}
    none = summarise([None])
    needed = dict.fromkeys(("average_accuracy", "forgetting", "backward_transfer", "nll", "ece"), none)
    return Result(
        benchmark=cell.benchmark,
        method=cell.method,
        preset=cell.preset,
        config={**cell.settings, "tasks": cell.tasks, **trunk, **of_cell},
        seeds=list(cell.seeds),
        seconds=round(seconds, 3),
        memory_bytes=size,
        environment=machine,
        **{"accuracy": None, **needed, **measures},
    )


def over_tasks(matrix: NDArray[np.float32]) -> dict[str, Any]:
    """What follows from a matrix of scores [after task, of task]."""
    return {
        "forgetting": summarise([metrics.forgetting(matrix)]),
        "backward_transfer": summarise([metrics.backward_transfer(matrix)]),
    }


def matrices_of(matrix: NDArray[np.float32]) -> Matrices:
    """The matrix of one seed, as a result has it."""
    return [[[value if math.isfinite(value) else None for value in row] for row in matrix.tolist()]]


def result_of(
    cell: Config,
    r: int,
    found: StreamResult,
    trunk: Mapping[str, object],
    seconds: float,
    size: int,
    machine: Environment,
    names: Sequence[str] = (),
) -> Result:
    """The result of a cell, which is replica r of its program and keeps `size` bytes. `names`: those of its tasks."""
    matrix = found.accuracy[r].numpy()
    diverged = bool(np.isnan(matrix[-1]).all())  # its predictions are from before it diverged
    each = [(p[r].cpu(), y[r % len(y)].cpu()) for p, y in zip(found.probabilities, found.labels, strict=True)]

    def per_task(measure: Callable[[Any, Any], float]) -> Summary:
        """The mean over tasks, after the last one."""
        return summarise([math.nan if diverged else float(np.mean([measure(p, y) for p, y in each]))])

    mean = summarise([metrics.average_accuracy(matrix)])
    if not found.labels:
        measures: dict[str, Any] = {"log_likelihoods": matrices_of(matrix), "log_likelihood": mean}
    else:
        measures = {"accuracy": matrices_of(matrix), "average_accuracy": mean, "nll": per_task(metrics.nll)}
        measures["ece"] = per_task(metrics.expected_calibration_error)
        if not diverged:
            measures["reliability"] = binned(sum(metrics.reliability(p, y) for p, y in each))
    if found.samples is not None and not diverged:
        measures["samples"] = picture(found.samples[r].numpy())
    measures["inferred_accuracy"] = {
        how: summarise([math.nan if diverged else float(one[r])])
        for how, one in found.inferred.items()
        if bool(one[r].isfinite())
    }
    measures |= over_tasks(matrix)
    return cell_result(cell, machine, seconds, size, trunk, task_names=list(names), **measures)
