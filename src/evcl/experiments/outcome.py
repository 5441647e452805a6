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

from evcl import metrics
from evcl.experiments.config import Config
from evcl.experiments.result import Environment, Matrices, Result, binned, summarise
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


def result_of(
    cell: Config,
    r: int,
    found: StreamResult,
    shape: Mapping[str, Any],
    seconds: float,
    size: int,
    machine: Environment,
    names: Sequence[str] = (),
) -> Result:
    """The result of a cell, which is replica r of its program and keeps `size` bytes. `names`: those of its tasks."""
    matrix = found.accuracy[r].numpy()
    diverged = bool(np.isnan(matrix[-1]).all())  # its predictions are from before it diverged

    def per_task(measure: Callable[[Any, Any], float]) -> float:
        """The mean over tasks, after the last one."""
        each = zip(found.probabilities, found.labels, strict=True)
        return math.nan if diverged else float(np.mean([measure(p[r].cpu(), y[r % len(y)].cpu()) for p, y in each]))

    matrices: Matrices = [[[value if math.isfinite(value) else None for value in row] for row in matrix.tolist()]]
    mean, labelled = summarise([metrics.average_accuracy(matrix)]), bool(found.labels)
    return Result(
        benchmark=cell.benchmark,
        method=cell.method,
        preset=cell.preset,
        config={**cell.settings, **shape},
        seeds=list(cell.seeds),
        accuracy=matrices if labelled else None,
        average_accuracy=mean if labelled else summarise([None]),
        log_likelihoods=None if labelled else matrices,
        log_likelihood=None if labelled else mean,
        samples=None if found.samples is None or diverged else picture(found.samples[r].numpy()),
        forgetting=summarise([metrics.forgetting(matrix)]),
        backward_transfer=summarise([metrics.backward_transfer(matrix)]),
        nll=summarise([per_task(metrics.nll) if labelled else None]),
        ece=summarise([per_task(metrics.expected_calibration_error) if labelled else None]),
        reliability=binned(_reliability(found, r)) if labelled and not diverged else None,
        inferred_accuracy={
            how: summarise([math.nan if diverged else float(each[r])])
            for how, each in found.inferred.items()
            if bool(each[r].isfinite())
        },
        task_names=list(names),
        seconds=seconds,
        memory_bytes=size,
        environment=machine,
    )


def _reliability(found: StreamResult, r: int) -> Any:
    """The sums of `evcl.metrics.reliability` over the examples of all tasks, after the last one."""
    each = zip(found.probabilities, found.labels, strict=True)
    return sum(metrics.reliability(p[r].cpu(), y[r % len(y)].cpu()) for p, y in each)
