"""Result files, in the order that tables and figures show them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evcl.benchmarks import BENCHMARKS
from evcl.errors import EvclError
from evcl.experiments import RESULT, read_result
from evcl.methods import METHODS
from evcl.metrics import accuracy_curve

Result = dict[str, Any]


def find_results(folder: Path) -> list[Result]:
    """Every result below a folder."""
    if not folder.is_dir():
        raise EvclError(f"there is no folder {folder}")
    found = [read_result(path) for path in sorted(folder.rglob(RESULT))]
    if not found:
        raise EvclError(f"{folder} holds no {RESULT}: make one with evcl run")
    return found


def by_benchmark(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Results grouped by benchmark; benchmarks and methods in the order of `evcl list`, others behind them."""
    groups: dict[str, list[Result]] = {}
    for name in sorted({r["benchmark"] for r in results}, key=_place(list(BENCHMARKS))):
        groups[name] = sorted(
            (r for r in results if r["benchmark"] == name),
            key=lambda r: (_place(list(METHODS))(r["method"]), r["preset"]),
        )
    return groups


def _place(order: list[str]) -> Any:
    return lambda name: (order.index(name) if name in order else len(order), name)


def label(result: Result, group: Sequence[Result]) -> str:
    """The method's name, and the preset's or a number where a benchmark has several of it."""
    same = [r for r in group if r["method"] == result["method"]]
    if len(same) == 1:
        return str(result["method"])
    if len({r["preset"] for r in same}) == len(same):
        return f"{result['method']} ({result['preset']})"
    return f"{result['method']} ({same.index(result) + 1})"


def curves(result: Result) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation over the seeds, [tasks] each, of the average accuracy after each task."""
    rows = np.array([accuracy_curve(np.array(m, dtype=float)) for m in result["accuracy"]])
    spread = rows.std(0, ddof=1) if len(rows) > 1 else np.zeros(rows.shape[1])
    return rows.mean(0), spread


def percent(summary: dict[str, Any] | None, digits: int = 1) -> str:
    """'83.1 ± 2.0' from a fraction's mean and deviation."""
    if not summary or summary["mean"] is None:
        return "-"
    text = f"{round(100 * summary['mean'], digits) + 0.0:.{digits}f}"  # + 0.0: no "-0.0"
    return text if summary["std"] is None else f"{text} ± {100 * summary['std']:.{digits}f}"


COLUMNS = ("method", "average accuracy", "forgetting", "NLL", "calibration error", "seconds")


def rows(group: Sequence[Result]) -> list[tuple[str, ...]]:
    """A benchmark's table, in the words of COLUMNS: percentages but for the NLL (nats) and the seconds."""
    return [
        (
            label(r, group),
            percent(r["average_accuracy"]),
            percent(r.get("forgetting")),
            "-" if r.get("nll", {}).get("mean") is None else f"{r['nll']['mean']:.2f}",
            percent(r.get("ece")),
            f"{r['seconds']:.1f}",
        )
        for r in group
    ]


def caption(group: Sequence[Result]) -> str:
    """What the numbers of a benchmark are: seeds, tasks, data, machine."""
    seeds = sorted({len(r["seeds"]) for r in group})
    held = {r["config"].get("validation", 0) for r in group}
    data = "test data" if held == {0} else "a held-out part of the training data" if 0 not in held else "mixed data"
    counts = "/".join(map(str, seeds)) + (" seed" if seeds == [1] else " seeds")
    tasks, machines = (
        " / ".join(sorted({str(v) for v in values}))
        for values in (
            [r["config"]["tasks"] for r in group],
            [f"{r['environment']['device']}, {r['environment']['platform']}" for r in group],
        )
    )
    return f"{tasks} tasks; mean ± standard deviation over {counts}, on {data}; {machines}"
