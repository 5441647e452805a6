"""Read `result.json` and check it; nothing else reads such a file."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import asdict

from evcl._core.bounds import MOST_LISTS, MOST_NUMBERS, MOST_RESULT_BYTES
from evcl._core.errors import EvclError
from evcl._core.files import read_text
from evcl._core.shown import plain, shown
from evcl.experiments.result import RANGES, SCHEMA, SCORES, Result, StreamMeasures, Summary
from evcl.experiments.samples import decoded

RELIABILITY_BINS = 15
PREQUENTIAL: dict[str, tuple[float, float]] = {  # measures of a stream; the first three are also those of numbers
    "rmse": (0, math.inf),
    "nll": (-1e6, 1e6),
    "coverage": (0, 1),
    "accuracy": (0, 1),
    "brier": (0, 2),
    "ece": (0, 1),
    "kappa": (-1, 1),
}


class _Version(Struct):
    schema: int


def read_result(path: Path) -> Result:
    """Read and check a result file: its types, its sizes, and that its numbers are finite and in range."""
    try:
        text = read_text(path, MOST_RESULT_BYTES)
        if text.count("[") + text.count("{") > MOST_LISTS + len(text) // 64:
            raise ValueError("it has more lists than a result has")
        # each takes up to 46 bytes, however short its text is, and a null a quarter of that
        if text.count(",") - text.count("null") * 3 // 4 > MOST_NUMBERS + len(text) // 23:
            raise ValueError("it has more numbers than a result has")
        schema = msgspec.json.decode(text, type=_Version).schema
        if schema != SCHEMA:
            raise ValueError(f"schema {schema}")
        result = msgspec.json.decode(text, type=Result)
        _check(result)
    except (ValueError, RecursionError) as error:
        raise EvclError(f"{path} is not a result of evcl ({shown(str(error)[:500], True)})") from error
    return result


def _check_names(result: Result) -> None:
    """Names are printed and drawn: they have no control characters, and no halves of letters."""
    names = {name: getattr(result, name) for name in ("benchmark", "method", "preset")}
    names |= {f"task {i + 1}": name for i, name in enumerate(result.task_names)}
    names |= {f"config {name}": name for name in (*result.config, *result.inferred_accuracy)}
    names |= {f"part {name}": name for name in (*result.parts, *result.rules)}
    names |= {name: text for name, text in asdict(result.environment).items() if isinstance(text, str)}
    for name, text in names.items():
        if not plain(text):
            raise ValueError(f"{shown(name, True)} should have no control characters")


def _check_range(name: str, summary: Summary, low: float, high: float, seeds: int) -> None:
    values = [summary.mean, summary.std, *summary.per_seed]
    if len(values) != seeds + 2 or any(value is not None and not low <= value <= high for value in values):
        raise ValueError(f"{name} should have one number per seed, from {low:g} to {high:g}")


def _check_summaries(result: Result) -> None:
    """Each measure has a value per seed, in its range, and a mean only if all seeds have one."""
    count = len(result.seeds)
    summaries = {name: (result.measure(name), *ends) for name, ends in RANGES.items()}
    for name in ("forgetting", "backward_transfer"):  # in units of the score
        low, high = RANGES[name]
        width = 1 if result.score == "average_accuracy" else RANGES[result.score][1]
        summaries[name] = result.measure(name), width * low, width * high
    summaries |= {f"inferred_accuracy {how}": (one, 0, 1) for how, one in result.inferred_accuracy.items()}
    for name, (summary, low, high) in summaries.items():
        _check_range(name, summary, low, high, count)
        if None in summary.per_seed and (summary.mean is not None or summary.std is not None):
            raise ValueError(f"{name} should have no mean where a seed has no number")


def _check(result: Result) -> None:
    """Check what the types cannot express."""
    _check_names(result)
    if not all(0 <= seed < 2**63 for seed in result.seeds):
        raise ValueError("seeds should be whole numbers from 0 to 2^63 - 1")
    count, tasks, validation = len(result.seeds), result.config.get("tasks"), result.config.get("validation", 0.0)
    if not count or len(set(result.seeds)) != count:
        raise ValueError("seeds should be one or more different whole numbers")
    if type(tasks) is not int or not 1 <= tasks < 2**31:
        raise ValueError("config.tasks should be a whole number, at least 1")
    if type(validation) not in (int, float) or not 0 <= validation < 1:
        raise ValueError("config.validation should be at least 0 and less than 1")
    if not 0 <= result.seconds < 1e12 or not 0 <= (result.memory_bytes or 0) < 2**63:
        raise ValueError("seconds and memory_bytes should be at least 0, and below 1e12 and 2^63")
    _check_summaries(result)
    if len(result.task_names) not in (0, tasks):
        raise ValueError(f"task_names should have a name for each of {tasks} tasks")
    _check_parts(result, count)
    if result.matrices is None:
        return
    name = SCORES[result.score].matrices
    matrices = np.array(result.matrices, dtype=np.float64)  # None becomes NaN
    if matrices.shape != (count, tasks, tasks):
        raise ValueError(f"{name} has the shape {matrices.shape}, not {(count, tasks, tasks)}")
    low, high = RANGES[result.score]
    if (matrices < low).any() or (matrices > high).any():
        raise ValueError(f"{name} should lie between {low:g} and {high:g}")
    if np.isnan(matrices[:, -1]).any() or result.diverged:
        raise ValueError(f"the last row of {name}, and so its average, should be measured")


def _check_parts(result: Result, seeds: int) -> None:
    if result.samples is not None:
        decoded(result.samples)
    if result.reliability is not None:
        if [len(bins) for bins in result.reliability] != [RELIABILITY_BINS] * seeds:
            raise ValueError(f"reliability should have {RELIABILITY_BINS} bins for each of {seeds} seeds")
        if not all(0 <= value <= 1 for bins in result.reliability for one in bins for value in one):
            raise ValueError("reliability should lie between 0 and 1")
    if result.prequential is not None:
        _check_prequential(result.prequential, seeds)


def _check_prequential(found: StreamMeasures, seeds: int) -> None:
    if found.rows < 1 or found.window < 1:
        raise ValueError("prequential.rows and prequential.window should be at least 1")
    points = -(-found.rows // found.window)
    for name in {*found.measures, *found.curves}:
        low, high = PREQUENTIAL.get(name, (-math.inf, math.inf))
        summary, curves = found.measures.get(name), found.curves.get(name)
        if summary is not None:
            _check_range(f"prequential {name}", summary, low, high, seeds)
        if curves is not None and [len(curve) for curve in curves] != [points] * seeds:
            raise ValueError(f"the curves of {name} should have {points} numbers for each of {seeds} seeds")
        if any(value is not None and not low <= value <= high for curve in curves or () for value in curve):
            raise ValueError(f"the curves of {name} should lie between {low:g} and {high:g}")
    rows = [*found.changes, *(alarm.row for alarms in found.alarms for alarm in alarms)]
    if len(found.alarms) != seeds or not all(0 <= row < found.rows for row in rows):
        raise ValueError("prequential.alarms should have a list per seed, of rows of the stream")
