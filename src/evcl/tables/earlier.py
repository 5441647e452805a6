"""What earlier tasks are at now: measured on the rows that are kept of them or, without these, estimated.

The estimate needs a small summary of each task: for each class, at most 16 means of similar rows, and the standard
deviation of the rows about them. Pseudo-rows are drawn from it, and the model predicts them. With f the fraction that
it gets right now, f_0 when the task was learned, and a_0 the accuracy on n held-out rows at that time,

    estimate = f (1 + w (a_0 / f_0 - 1)),    w = b^2 / (b^2 + p (1 - p) / n),    p = (a_0 n + 1) / (n + 2)

Pseudo-rows are not exactly as hard as real ones: f_0 is off by some b = 0.05. So the ratio a_0 / f_0 corrects them, as
far as the held-out rows are enough to tell. `laws/earlier.py` measures the error of the estimate.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.randomness import Purpose, generator
from evcl.tables.source import Json

if TYPE_CHECKING:
    from evcl.tables.model import Model

MAX_MEANS = 16  # per class
MIN_ROWS = 5  # per mean
ROWS_PER_MEAN = 8  # on average
MAX_MEAN_NUMBERS, MAX_SUMMARY_NUMBERS = 10_000, 40_000  # of all means: there are fewer of them; there is no summary
SUMMARISED_ROWS = 5_000  # of a task that are summarised
MOST_SUMMARIES = 100  # those of the last tasks are kept
PSEUDO_ROWS = 500
ROUNDS = 8  # of Lloyd's algorithm
ACCURACY_BIAS = 0.05  # b
MIN_KEPT_ROWS = 20  # with fewer kept rows of a task, its accuracy is estimated


SUMMARY = "summary."  # in a file, the prefix of these tensors; then the number of the task, and a name


class Now(NamedTuple):
    """The accuracy of a task now, and whether it is an estimate."""

    accuracy: float
    estimated: bool


@dataclass(frozen=True)
class Summary:
    """The summary of a task with K means of D inputs."""

    means: Tensor  # [K, D], float32
    std: Tensor  # [K, D]: of the rows of a mean's class about their means
    codes: Tensor  # [K], int64: the class of each mean
    counts: Tensor  # [K], int64: the number of its rows
    right: Tensor  # [], float64: f_0

    def pseudo_rows(self, inputs: int, seed: int, task: int) -> tuple[Tensor, Tensor]:
        """Draw rows [N, inputs] and their classes [N]. Inputs that came later were 0."""
        drawn = generator(seed, Purpose.PSEUDO_ROWS, task)
        share = (self.counts * PSEUDO_ROWS / self.counts.sum()).round().clamp_min(1).long()
        place = torch.arange(len(share)).repeat_interleave(share)
        noise = torch.randn(len(place), self.means.shape[1], generator=drawn)
        x = torch.zeros(len(place), inputs)
        x[:, : self.means.shape[1]] = self.means[place] + noise * self.std[place]
        return x, self.codes[place]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save. Means of one class share a standard deviation, which is saved once."""
        own = self.codes.unique()
        first = torch.stack([(self.codes == code).nonzero()[0, 0] for code in own])
        return {**{one.name: getattr(self, one.name) for one in fields(self)}, "std": self.std[first]}

    @staticmethod
    def from_tensors(given: Mapping[str, Tensor], inputs: int, classes: int) -> Summary:
        """The inverse of `tensors`. Files are not trusted, so invalid values raise an EvclError."""
        means, std, codes, counts, right = (given[one.name] for one in fields(Summary))
        shaped = means.dim() == 2 and len(means) > 0 and 0 < means.shape[1] <= inputs
        shaped = shaped and codes.shape == counts.shape == means.shape[:1] and right.shape == ()
        kinds = (means.dtype, std.dtype, codes.dtype, counts.dtype, right.dtype)
        if not shaped or kinds != (torch.float32, torch.float32, torch.int64, torch.int64, torch.float64):
            raise EvclError("the summary of a task has tensors of other shapes or types")
        own, place = codes.unique(return_inverse=True)
        finite = bool(means.isfinite().all()) and bool(std.isfinite().all()) and 0 <= float(right) <= 1
        inside = int(codes.min()) >= 0 and int(codes.max()) < classes and int(counts.min()) > 0
        if std.shape != (len(own), means.shape[1]) or not finite or not inside or int(counts.max()) > 2**40:
            raise EvclError("the summary of a task is damaged")
        return Summary(means, std[place], codes, counts, right)


def tensors_of(summaries: Mapping[str, Summary], tasks: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of all summaries, with their names in a file."""
    return {
        f"{SUMMARY}{tasks.index(name)}.{part}": tensor
        for name, summary in summaries.items()
        for part, tensor in summary.tensors().items()
    }


def read_summaries(
    tensors: Mapping[str, Tensor], tasks: Sequence[str], inputs: int, classes: int
) -> dict[str, Summary]:
    """The inverse of `tensors_of`; files of earlier versions have none."""
    parts: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, _, part = name.removeprefix(SUMMARY).partition(".")
        parts.setdefault(int(number), {})[part] = tensor
    if not all(0 <= number < len(tasks) for number in parts):
        raise EvclError("a summary is of a task that was not learned")
    return {tasks[number]: Summary.from_tensors(part, inputs, classes) for number, part in sorted(parts.items())}


def summarised(model: Model, x: Tensor, y: Tensor, task: str) -> Summary | None:
    """Summarise rows x [N, D] of classes y [N] of the last task; None if they have too many numbers or too few rows."""
    learner = model.learner
    drawn = generator(learner.seed, Purpose.SUMMARY, len(learner.tasks))
    some = torch.randperm(len(x), generator=drawn)[:SUMMARISED_ROWS]
    x, y = x[some].float(), y[some]
    codes, rows = y.unique(return_counts=True)
    codes = codes[rows >= MIN_ROWS]
    if not len(codes) or len(codes) * x.shape[1] > MAX_SUMMARY_NUMBERS:
        return None
    most = max(1, min(MAX_MEANS, MAX_MEAN_NUMBERS // (len(codes) * x.shape[1])))
    means, std, owners, counts = [], [], [], []
    for code in codes.tolist():
        own = x[y == code]
        centres, place = _similar(own, min(most, max(1, len(own) // ROWS_PER_MEAN)), drawn)
        means.append(centres)
        std.append((own - centres[place]).square().mean(0).sqrt().expand_as(centres))
        owners.append(torch.full((len(centres),), code))
        counts.append(place.bincount(minlength=len(centres)))
    unknown = torch.tensor(0.0, dtype=torch.float64)
    summary = Summary(torch.cat(means), torch.cat(std), torch.cat(owners), torch.cat(counts), unknown)
    return replace(summary, right=torch.tensor(_right(model, {task: summary})[task], dtype=torch.float64))


def _similar(x: Tensor, count: int, drawn: torch.Generator) -> tuple[Tensor, Tensor]:
    """At most `count` means of similar rows, by Lloyd's algorithm, and the position of each row's mean [N]. Each is
    the mean of at least MIN_ROWS rows: a summary holds no row.
    """
    centres = x[torch.randperm(len(x), generator=drawn)[:count]]
    for i in range(ROUNDS + count):
        place = torch.cdist(x, centres).argmin(1)
        rows = place.bincount(minlength=len(centres))
        if i >= ROUNDS and int(rows.min()) >= MIN_ROWS:
            break
        if i >= ROUNDS or int(rows.min()) == 0:  # the smallest joins others
            kept = torch.arange(len(centres)) != rows.argmin()
            centres = centres[kept]
            continue
        centres = torch.zeros_like(centres).index_add_(0, place, x) / rows[:, None]
    place = torch.cdist(x, centres).argmin(1)
    rows = place.bincount(minlength=len(centres)).clamp_min(1)
    return torch.zeros_like(centres).index_add_(0, place, x) / rows[:, None], place


def _right(model: Model, summaries: Mapping[str, Summary]) -> dict[str, float]:
    """For each of these tasks, the fraction of its pseudo-rows that the model predicts correctly."""
    learner, drawn = model.learner, {}
    together: dict[str, list[str]] = {}  # tasks that are predicted alike
    for task, summary in summaries.items():
        drawn[task] = summary.pseudo_rows(model.encoder.inputs, learner.seed, learner.tasks.index(task))
        together.setdefault(learner.predicted_as(task), []).append(task)
    accuracies = {}
    for tasks in together.values():
        right = learner.predict(torch.cat([drawn[task][0] for task in tasks]), tasks[0])
        for task, own in zip(tasks, right.split([len(drawn[task][1]) for task in tasks]), strict=True):
            accuracies[task] = float((own == drawn[task][1]).double().mean())
    return accuracies


def standing(model: Model) -> dict[str, Now]:
    """For each task, what it is at now, if that is known: measured on its kept rows, or estimated."""
    if model.numeric:
        return {}
    kept = {name: Now(part, False) for name, part in model.learner.evaluate_kept(MIN_KEPT_ROWS).items()}
    right = _right(model, {name: one for name, one in model.summaries.items() if name not in kept})
    now = {}
    for line in model.history:
        name = line["task"]
        if name in kept:
            now[name] = kept[name]
        elif name in right:
            measured, then = line["accuracy"] if line["held_out"] else None, float(model.summaries[name].right)
            now[name] = Now(estimate(right[name], then, measured, line["held_out"]), True)
    return now


def unknown(model: Model, now: Collection[str]) -> dict[str, list[str]]:
    """The tasks without an accuracy now, that is, those not in `now`, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for place, line in enumerate([] if model.numeric else model.history):
        if line["task"] in now:
            continue
        if "unfamiliar" not in line:
            why = "an earlier version of evcl learned them"
        elif place < len(model.history) - MOST_SUMMARIES:
            why = f"there is an estimate for the last {MOST_SUMMARIES} tasks only"
        elif line["examples"] < MIN_ROWS * line["classes"]:
            why = "too few rows per class for an estimate"
        else:
            why = "too many inputs and classes for an estimate"
        by_reason.setdefault(why, []).append(line["task"])
    return by_reason


def checked(saved: Any, tasks: Collection[str]) -> dict[str, Now]:
    """What tasks were at when a file was saved. Files are not trusted: raises if it cannot be read."""
    now = {task: Now(float(accuracy), bool(estimated)) for task, (accuracy, estimated) in saved.items()}
    if not all(task in tasks and 0 <= one.accuracy <= 1 for task, one in now.items()):
        raise EvclError("what its tasks are at now cannot be read")
    return now


def estimate(now: float, then: float, measured: float | None, rows: int) -> float:
    """The estimated accuracy, from the fractions of pseudo-rows that are predicted correctly now and were then, and the
    accuracy on this many rows then.
    """
    if measured is None or then == 0:
        return now
    weight = ACCURACY_BIAS**2 / (ACCURACY_BIAS**2 + _variance(measured, rows))
    return min(1.0, now * (1 + weight * (measured / then - 1)))


def _variance(accuracy: float, rows: int) -> float:
    """That of an accuracy measured on this many rows."""
    p = (accuracy * rows + 1) / (rows + 2)
    return p * (1 - p) / rows


# --- what to tell -----------------------------------------------------------------------------------------------------

MIN_UNFAMILIAR = 1.5  # median `unfamiliar` of a file's rows, from which on they are of another kind
MAX_FAMILIAR = 1.1  # rows of the same kind have 0.7 to 1.1; if only some columns have moved, they have more
NOTED_FALL = 0.1  # of an accuracy that is worth a note


def advice(model: Model, before: Mapping[str, Now]) -> list[str]:
    """What the user should know after the last task, one line each, with what would help where something does.
    `before`: what earlier tasks were at before it.
    """
    *earlier, line = model.history
    now, notes = model.now, []
    strange = line.get("unfamiliar")
    new = len(model.labels) - line["known_before"]  # classes, which are named already, and explain strange rows
    if strange is not None and strange >= MIN_UNFAMILIAR and new < line["classes"]:
        rows = f"its rows are unlike all earlier ones (unfamiliar {strange:.1f}, where 1 is usual)"
        notes.append(f"{rows}: what the model knew said little about them")
    elif not new and strange is not None and strange <= MAX_FAMILIAR and _other_rule(earlier, line):
        was, own = (f"{100 * line[key]:.0f}%" for key in ("accuracy_before", "accuracy"))
        notes.append(
            f"its rows look like earlier ones, but their labels may follow another rule ({was} right before it was "
            f"learned, {own} after): if both rules hold, --head new keeps them apart"
        )
    lost = [
        f"{one['task']} {100 * now[one['task']].accuracy:.0f}% (was {100 * one['accuracy']:.0f}%)"
        for one in earlier
        if one["held_out"]
        and one["task"] in now
        and now[one["task"]].accuracy < one["accuracy"] - _fall(one)
        and now[one["task"]].accuracy < before.get(one["task"], Now(1.0, True)).accuracy - NOTED_FALL / 2
    ]
    if lost and not any("--head new" in one for one in notes):
        more = f" and {len(lost) - 4} more" if len(lost) > 4 else ""
        notes.append(f"it cost earlier tasks accuracy: {', '.join(lost[:4])}{more}{_help(model)}")
    return notes


def _fall(line: Json) -> float:
    """The loss of accuracy that is no accident of the few rows that were held out of a task."""
    return NOTED_FALL + 2 * math.sqrt(_variance(line["accuracy"], line["held_out"]))


def _help(model: Model) -> str:
    """What would make later files cost less, if anything would."""
    if model.learner.kept or not model.learner.can_keep:
        return ""
    return "; --keep 200 keeps rows, and later files then cost less"


def _other_rule(earlier: list[Json], line: Json) -> bool:
    """Whether the model was much worse on this file before it learned it than on the last one, and than it is now."""
    before, last = line.get("accuracy_before"), earlier[-1] if earlier else {}
    if before is None or not last.get("held_out"):
        return False
    noise = 2 * math.sqrt(0.25 / line["held_out"])
    return bool(min(last["accuracy"], line["accuracy"]) > before + NOTED_FALL + noise)
