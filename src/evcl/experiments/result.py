"""The type of `result.json`. `reading.py` reads and checks such a file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import replace

from evcl._core.bounds import LONGEST_NAME
from evcl._core.errors import EvclError
from evcl.experiments.known import known_benchmark
from evcl.experiments.samples import MOST_CHARACTERS

SCHEMA = 1
RESULT = "result.json"
"""The name of a run's result file."""
CELLS = "cells"
"""The folder in which a sweep keeps its cells."""
HIDDEN = ".cells"
"""The folder in which `reproduce` and `tune` keep their cells, beside their results."""
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
    *("log_likelihood", "log_likelihoods", "sample_uncertainty", "samples", "reliability", "task_names", "composed"),
    *("parts", "rules", "resolved"),
)
Bins = list[list[tuple[float, float, float]]]  # [seed][bin]: see `Result.reliability`
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


SCORES = {
    "average_accuracy": Score("accuracy", "average accuracy", "%", 100.0, most=100.0),
    "log_likelihood": Score("log_likelihoods", "log-likelihood", "nats"),
    "average_return": Score("returns", "average return", places=1),
}
"""What a benchmark can be judged by: the measure of a `Result`, and how it is shown."""
Name = Annotated[str, Meta(max_length=LONGEST_NAME)]


def score_of(benchmark: str) -> Score:
    """What a benchmark is judged by; the accuracy if it is unknown."""
    known = known_benchmark(benchmark)
    return SCORES["average_accuracy" if known is None else known.score]


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
        composed: the name of the method that the settings compose, if it is another: `evcl` with a memory is `evcl-er`
        preset: the preset's name
        config: every setting, and the shape of the stream and of the network
        parts: what the method is composed of and was in force, such as "distillation"; see `evcl list constants`
        rules: the constants of these parts, by the names of their settings
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
            samples of each task so far. Of agents: pictures of an episode, a row for each task, after the last one;
            with one agent per task, of the last task alone
        prequential: of streams of rows, which have no tasks: how well each row was predicted before it was learned
        reliability: of classes: `[seed][bin]`, 15 bins of the largest probability; of each, the fraction of the
            predictions, their mean probability, and the fraction of them that is right. Over the examples of all tasks
            after the last one; of a stream, over all rows
        resolved: for each seed, what settings that are auto were in the last round: numbers, or a number for each name
            of weights
        task_names: the name of each task, if its benchmark names them
        seconds: the time it took, summed over the seeds
        memory_bytes: the size of the weights and of what the method keeps beside them, after the last task, for one
            seed; None: not measured
        environment: where it was computed
    """

    schema: int = SCHEMA
    benchmark: Name
    method: Name
    composed: Name | None = None
    preset: Name
    config: dict[Name, Any]
    parts: list[Name] = []
    rules: dict[Name, float | bool] = {}
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
    reliability: Bins | None = None
    resolved: list[dict[Name, float | str | dict[str, float]]] = []
    task_names: list[Name] = []
    seconds: float
    memory_bytes: int | None = None
    environment: Environment

    @property
    def name(self) -> str:
        """The name of the method as it was composed."""
        return self.composed or self.method

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
        matrices: Matrices | None = getattr(self, SCORES[self.score].matrices)
        return matrices

    def measure(self, name: str) -> Summary:
        """One of MEASURES or SCORES; it has no values if it was not measured."""
        summary: Summary | None = getattr(self, name)
        return summary or Summary(None, None, [None] * len(self.seeds))


def summarise(values: Sequence[float | None]) -> Summary:
    """Summarise a measure's values over the seeds. There is no mean if a value is missing or not finite."""
    finite = [value if value is not None and math.isfinite(value) else None for value in values]
    present = [value for value in finite if value is not None]
    if len(present) < len(finite):
        return Summary(None, None, finite)
    return Summary(float(np.mean(present)), float(np.std(present, ddof=1)) if len(present) > 1 else None, finite)


def binned(sums: Any) -> Bins:
    """One seed's part of `Result.reliability`, from the sums of `evcl.metrics.reliability`."""
    whole = max(float(sums[:, 0].sum()), 1.0)
    return [[(round(n / whole, 6), round(c / max(n, 1), 5), round(r / max(n, 1), 5)) for n, c, r in sums.tolist()]]


def merge(results: Sequence[Result]) -> Result:
    """Merge the results of one configuration's seeds into one result."""
    if len(results) == 1:
        return results[0]
    first, score = results[0], results[0].score
    matrices = [matrix for result in results if result.matrices is not None for matrix in result.matrices]
    bins = [result.reliability for result in results if result.reliability is not None]
    known = {*MEASURES, score, *(() if first.sample_uncertainty is None else ("sample_uncertainty",))}
    return replace(
        first,
        seeds=[seed for result in results for seed in result.seeds],
        seconds=round(sum(result.seconds for result in results), 3),
        resolved=[one for result in results for one in result.resolved],
        memory_bytes=max((r.memory_bytes for r in results if r.memory_bytes is not None), default=None),
        inferred_accuracy=_together([result.inferred_accuracy for result in results]),
        reliability=[one for some in bins for one in some] if len(bins) == len(results) else None,
        prequential=_merged([result.prequential for result in results if result.prequential is not None]),
        **{SCORES[score].matrices: matrices or None},
        **{name: _joined([result.measure(name) for result in results]) for name in known},
    )


def _joined(summaries: Sequence[Summary]) -> Summary:
    return summarise([value for one in summaries for value in one.per_seed])


def _together(measures: Sequence[Mapping[str, Summary]]) -> dict[str, Summary]:
    """The measures of all seeds; one that a seed lacks is left out."""
    names = [name for name in measures[0] if all(name in one for one in measures)]
    return {name: _joined([one[name] for one in measures]) for name in names}


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
    curves = [name for name in first.curves if all(name in one.curves for one in blocks)]
    return replace(
        first,
        measures=_together([one.measures for one in blocks]),
        curves={name: [c for one in blocks for c in one.curves[name]] for name in curves},
        alarms=[alarms for one in blocks for alarms in one.alarms],
    )


def to_json(content: Result | Mapping[str, object]) -> str:
    """The JSON text of a file. Uses `json`, because msgspec prints some floats differently. What was not measured is
    left out.
    """
    built = msgspec.to_builtins(content)
    for name in OPTIONAL:
        if not built.get(name, True):
            del built[name]
    return json.dumps(built, indent=1, allow_nan=False) + "\n"
