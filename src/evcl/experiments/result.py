"""The type of `result.json`, and the only code that reads and checks such a file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from evcl._core.bounds import LONGEST_NAME, MOST_LISTS, MOST_NUMBERS, MOST_RESULT_BYTES
from evcl._core.errors import EvclError
from evcl._core.files import read_text
from evcl._core.shown import plain, shown
from evcl.experiments.samples import MOST_CHARACTERS, decoded

SCHEMA = 1
RESULT = "result.json"
"""The name of a run's result file."""
RANGES: dict[str, tuple[float, float]] = {
    "average_accuracy": (0, 1),
    "forgetting": (-2, 2),
    "backward_transfer": (-2, 2),
    "nll": (0, 1e6),
    "ece": (0, 1),
}
MEASURES = tuple(RANGES)
RANGES |= {**dict.fromkeys(("log_likelihood", "average_return"), (-1e9, 1e9)), "sample_uncertainty": (0, 1e6)}
OPTIONAL = (
    *("memory_bytes", "inferred_accuracy", "prequential", "average_return", "returns"),
    *("log_likelihood", "log_likelihoods", "sample_uncertainty", "samples"),
)
Matrices = list[list[list[float | None]]]  # [seed][after task t][on task k]; None if not measured


class Score(NamedTuple):
    """What a benchmark is judged by: a matrix per seed, and its mean over the tasks after the last one."""

    matrices: str  # the field of `Result` with the matrices
    label: str
    unit: str = ""
    scale: float = 1.0  # tables and figures show the numbers times this
    places: int = 2
    most: float = math.inf  # no number is larger, as it is shown

    @property
    def title(self) -> str:
        """The label with the unit, as an axis has it."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    @property
    def of_task(self) -> str:
        """The label of a number in the matrices, which is of one task."""
        return self.label.removeprefix("average ")

    def text(self, value: float) -> str:
        """'84.1%' or '-91.2 nats'."""
        space = " " if len(self.unit) > 1 else ""
        return f"{self.scale * value:.1f}{space}{self.unit}"


PREQUENTIAL: dict[str, tuple[float, float]] = {  # measures of a stream; the first three are also those of numbers
    "rmse": (0, math.inf),
    "nll": (-1e6, 1e6),
    "coverage": (0, 1),
    "accuracy": (0, 1),
    "brier": (0, 2),
    "ece": (0, 1),
    "kappa": (-1, 1),
}
SCORES = {
    "average_accuracy": Score("accuracy", "average accuracy", "%", 100.0, most=100.0),
    "log_likelihood": Score("log_likelihoods", "log-likelihood", "nats"),
    "average_return": Score("returns", "average return", places=1),
}
"""What a benchmark can be judged by: the measure of a `Result`, and how it is shown."""
Name = Annotated[str, Meta(max_length=LONGEST_NAME)]


def score_of(benchmark: str) -> Score:
    """What a benchmark is judged by; the accuracy if it is unknown."""
    from evcl.benchmarks import BENCHMARKS  # it needs torch, which reading results does not

    return SCORES[BENCHMARKS[benchmark].score if benchmark in BENCHMARKS else "average_accuracy"]


class Summary(Struct, frozen=True):
    """A measure over the seeds; each value is None if it was not measured.

    Attributes:
        mean: over the seeds
        std: the standard deviation, with n - 1; None for one seed
        per_seed: the value of each seed
    """

    mean: float | None
    std: float | None
    per_seed: list[float | None]

    @property
    def measured(self) -> list[float]:
        """The values of the seeds for which it was measured."""
        return [value for value in self.per_seed if value is not None]


class AlarmRow(Struct, frozen=True):
    """An alarm of a learner: what it learned no longer holds.

    Attributes:
        row: the row at which it was raised, from 0
        surprise: how much larger the loss was than expected; see `evcl.streams.Alarm`
        columns: the columns that moved, those that moved most first
    """

    row: int
    surprise: float
    columns: list[Name] = []


class StreamMeasures(Struct, frozen=True):
    """How well a stream was predicted, each row before it was learned.

    Attributes:
        rows: the number of rows
        window: rows per point of the curves; the last point may have fewer
        measures: over all rows
        curves: measure -> `[seed][window]`; None if not measured
        alarms: `[seed][alarm]`
        changes: the rows at which the stream is known to change
    """

    rows: int
    window: int
    measures: dict[Name, Summary]
    curves: dict[Name, list[list[float | None]]]
    alarms: list[list[AlarmRow]]
    changes: list[int] = []


class Environment(Struct, frozen=True):
    """Where a result was computed, and by which versions.

    Attributes:
        evcl: the version of evcl
        torch: the version of torch
        device: the processor or GPU
        threads: the number of threads that torch used
        platform: the operating system and the version of Python
    """

    evcl: Name
    torch: Name
    device: Name
    threads: int
    platform: Name


class Result(Struct, frozen=True, kw_only=True):
    """The contents of `result.json`, in its order. Keys that a newer version has written are ignored.

    Attributes:
        schema: the version of this format
        benchmark: the benchmark's name
        method: the method's name
        preset: the preset's name
        config: every setting, and the shape of the stream and of the network
        seeds: the seeds; all values per seed are in this order
        accuracy: `[seed][after task t][on task k]`; None if not measured
        average_accuracy: over all tasks after the last one
        forgetting: see `evcl.metrics.forgetting`
        backward_transfer: see `evcl.metrics.backward_transfer`
        nll: over all tasks after the last one, in nats
        ece: the expected calibration error, over all tasks after the last one
        inferred_accuracy: over all tasks after the last one, if the task is not given but inferred, in each of the
            ways of `evcl.training.Session.infer`; empty if there is one head, or if the method is not Bayesian
        log_likelihood: of generative models: in nats per example, over all tasks after the last one
        log_likelihoods: as `accuracy`
        sample_uncertainty: of generative models: how unsure a classifier is that samples show their task's character,
            in nats: the mean of -log p(character), over all tasks after the last one
        average_return: of agents: over all tasks after the last one
        returns: as `accuracy`
        samples: of generative models: what the first seed generates, a PNG in base64: a row after each task, with a few
            samples of each task so far
        prequential: of streams of rows, which have no tasks: how well each row was predicted before it was learned
        seconds: the time it took, summed over the seeds
        memory_bytes: the size of the weights and of what the method keeps beside them, after the last task, for one
            seed; None: not measured
        environment: where it was computed
    """

    schema: int = SCHEMA
    benchmark: Name
    method: Name
    preset: Name
    config: dict[Name, Any]
    seeds: list[int]
    accuracy: Matrices | None
    average_accuracy: Summary
    forgetting: Summary
    backward_transfer: Summary
    nll: Summary
    ece: Summary
    inferred_accuracy: dict[Name, Summary] = {}
    log_likelihood: Summary | None = None
    log_likelihoods: Matrices | None = None
    sample_uncertainty: Summary | None = None
    average_return: Summary | None = None
    returns: Matrices | None = None
    prequential: StreamMeasures | None = None
    samples: Annotated[str, Meta(max_length=MOST_CHARACTERS)] | None = None
    seconds: float
    memory_bytes: int | None = None
    environment: Environment

    @property
    def tasks(self) -> int:
        """The number of tasks in the stream."""
        tasks: int = self.config["tasks"]
        return tasks

    @property
    def validation(self) -> float:
        """The fraction of each training set that was held out to measure on; 0 means measured on the test sets."""
        part: float = self.config.get("validation", 0.0)
        return part

    @property
    def diverged(self) -> bool:
        """Whether a seed diverged: its loss became NaN or infinite."""
        return self.matrices is not None and self.measure(self.score).mean is None

    @property
    def score(self) -> str:
        """The measure that the benchmark is judged by, one of SCORES."""
        return next((name for name in SCORES if getattr(self, SCORES[name].matrices) is not None), "average_accuracy")

    @property
    def matrices(self) -> Matrices | None:
        """The matrices of the score."""
        found: Matrices | None = getattr(self, SCORES[self.score].matrices)
        return found

    def measure(self, name: str) -> Summary:
        """One of MEASURES or SCORES; it has no values if it was not measured."""
        summary: Summary | None = getattr(self, name)
        return summary or Summary(None, None, [None] * len(self.seeds))


def summarise(values: Sequence[float | None]) -> Summary:
    """Summarise a measure's values over the seeds. There is no mean if a value is missing or not finite."""
    finite = [value if value is not None and math.isfinite(value) else None for value in values]
    found = [value for value in finite if value is not None]
    if len(found) < len(finite):
        return Summary(None, None, finite)
    return Summary(float(np.mean(found)), float(np.std(found, ddof=1)) if len(found) > 1 else None, finite)


def merge(results: Sequence[Result]) -> Result:
    """Merge the results of one configuration's seeds into one result."""
    score = results[0].score
    matrices = [result.matrices for result in results if result.matrices is not None]
    known = {*MEASURES, score, *(() if results[0].sample_uncertainty is None else ("sample_uncertainty",))}
    measures: dict[str, Any] = {
        name: summarise([v for r in results for v in r.measure(name).per_seed]) for name in known
    }
    measures[SCORES[score].matrices] = [matrix for some in matrices for matrix in some] if matrices else None
    return replace(
        results[0],
        seeds=[seed for result in results for seed in result.seeds],
        seconds=round(sum(result.seconds for result in results), 3),
        memory_bytes=max((r.memory_bytes for r in results if r.memory_bytes is not None), default=None),
        inferred_accuracy={
            how: summarise([v for r in results for v in r.inferred_accuracy[how].per_seed])
            for how in results[0].inferred_accuracy
            if all(how in result.inferred_accuracy for result in results)
        },
        prequential=_merged([result.prequential for result in results if result.prequential is not None]),
        **measures,
    )


def prequential(
    rows: int,
    window: int,
    measures: Mapping[str, float],
    curves: Mapping[str, Sequence[float]],
    alarms: Sequence[Any],
    changes: Sequence[int] = (),
) -> StreamMeasures:
    """The block of one seed: what `evcl.streams.evaluate` returns, with the alarms of its learner."""
    return StreamMeasures(
        rows=rows,
        window=window,
        measures={name: summarise([value]) for name, value in measures.items()},
        curves={name: [[v if math.isfinite(v) else None for v in values]] for name, values in curves.items()},
        alarms=[[AlarmRow(int(one.row), float(one.surprise), [str(name) for name in one.columns]) for one in alarms]],
        changes=list(changes),
    )


def _merged(blocks: Sequence[StreamMeasures]) -> StreamMeasures | None:
    """The blocks of one configuration's seeds as one. A measure that a seed lacks is left out."""
    if not blocks:
        return None
    first = blocks[0]
    if any((one.rows, one.window) != (first.rows, first.window) for one in blocks):
        raise EvclError("the seeds of a stream have different numbers of rows: they cannot be merged")
    names = [name for name in first.measures if all(name in one.measures for one in blocks)]
    return replace(
        first,
        measures={name: summarise([v for one in blocks for v in one.measures[name].per_seed]) for name in names},
        curves={
            name: [curve for one in blocks for curve in one.curves[name]]
            for name in first.curves
            if all(name in one.curves for one in blocks)
        },
        alarms=[alarms for one in blocks for alarms in one.alarms],
    )


def to_json(content: Result | Mapping[str, Any]) -> str:
    """The JSON text of a file. Uses `json`, because msgspec prints some floats differently. What was not measured is
    left out.
    """
    built = msgspec.to_builtins(content)
    for name in OPTIONAL:
        if not built.get(name, True):
            del built[name]
    return json.dumps(built, indent=1, allow_nan=False) + "\n"


class _Version(Struct):
    schema: int


def read_result(path: Path) -> Result:
    """Read and check a result file: its types, its sizes, and that its numbers are finite and in range."""
    try:
        text = read_text(path, MOST_RESULT_BYTES)
        if text.count("[") + text.count("{") > MOST_LISTS + len(text) // 64:
            raise ValueError("it has more lists than a result has")
        # each takes up to 46 bytes, however short its text is, and a null a quarter of that
        if text.count(",") - text.count("null") * 3 // 4 > MOST_NUMBERS + len(text) // 48:
            raise ValueError("it has more numbers than a result has")
        schema = msgspec.json.decode(text, type=_Version).schema
        if schema != SCHEMA:
            raise ValueError(f"schema {schema}")
        result = msgspec.json.decode(text, type=Result)
        _check(result)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise EvclError(f"{path} is not a result of evcl ({shown(str(error)[:500], True)})") from error
    return result


def _check_names(result: Result) -> None:
    """Names are printed and drawn: they have no control characters, and no halves of letters."""
    told = {name: getattr(result, name) for name in ("benchmark", "method", "preset")}
    told |= {f"config {name}": name for name in (*result.config, *result.inferred_accuracy)}
    told |= {name: text for name, text in asdict(result.environment).items() if isinstance(text, str)}
    for name, text in told.items():
        if not plain(text):
            raise ValueError(f"{shown(name, True)} should have no control characters")


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
        values = [summary.mean, summary.std, *summary.per_seed]
        if len(values) != count + 2 or any(value is not None and not low <= value <= high for value in values):
            raise ValueError(f"{name} should have one number per seed, from {low:g} to {high:g}")
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
    if result.samples is not None:
        decoded(result.samples)
    if result.prequential is not None:
        _check_prequential(result.prequential, count)
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


def _check_prequential(found: StreamMeasures, seeds: int) -> None:
    if found.rows < 1 or found.window < 1:
        raise ValueError("prequential.rows and prequential.window should be at least 1")
    points = -(-found.rows // found.window)
    for name in {*found.measures, *found.curves}:
        low, high = PREQUENTIAL.get(name, (-math.inf, math.inf))
        summary, curves = found.measures.get(name), found.curves.get(name)
        if summary is not None:
            values = [summary.mean, summary.std, *summary.per_seed]
            if len(values) != seeds + 2 or any(value is not None and not low <= value <= high for value in values):
                raise ValueError(f"prequential {name} should have one number per seed, from {low:g} to {high:g}")
        if curves is not None and [len(curve) for curve in curves] != [points] * seeds:
            raise ValueError(f"the curves of {name} should have {points} numbers for each of {seeds} seeds")
        if any(value is not None and not low <= value <= high for curve in curves or () for value in curve):
            raise ValueError(f"the curves of {name} should lie between {low:g} and {high:g}")
    rows = [*found.changes, *(alarm.row for alarms in found.alarms for alarm in alarms)]
    if len(found.alarms) != seeds or not all(0 <= row < found.rows for row in rows):
        raise ValueError("prequential.alarms should have a list per seed, of rows of the stream")
