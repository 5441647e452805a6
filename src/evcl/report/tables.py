"""Tables with text cells, for a terminal, for Markdown and for the page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from evcl.experiments import Result, Summary
from evcl.experiments.result import SCORES
from evcl.report.published import WHY
from evcl.report.results import HELD_OUT, Group, Line, series
from evcl.report.runs import command, machine, seeds

REFERENCE = "evcl"
DEFINITIONS = (
    "Average accuracy is the mean over the tasks seen so far, each measured again after every task; tables show it "
    "after the last task. Forgetting is how far the accuracy on a task has dropped from its best. NLL is the mean "
    "negative log-likelihood and ECE the expected calibration error (15 bins), both averaged over the tasks after the "
    "last one. MB is the size of the weights and of all that a method keeps beside them after the last task. "
    "Accuracies, forgetting and ECE are in per cent, the NLL in nats; ± is one standard deviation over the seeds "
    "(n - 1). Task inferred: the average accuracy if the task is not given, and each example is predicted by the head "
    "with the largest likelihood of it, or with the smallest entropy. Joint training sees all tasks at once: a "
    "ceiling, not a continual learner."
)
OTHERS = (
    "A benchmark without labels is judged by something else, whose name and unit its tables give: generative models by "
    "the log-likelihood of test examples, agents by the return of an episode. Average and forgetting are then those of "
    "that score, in its unit. Uncertainty of samples: the mean of -log p(character) of samples of each character, in "
    "nats, for a classifier that was trained on all of them."
)
BRACKETS = "In brackets: the published value, which is not what the paper's equations give (see the end)."
PAIRED = (
    "The difference in {score} after the last task, computed seed by seed and averaged over the common seeds, "
    "± the standard error of that mean{unit}. Positive values: {label} is better."
)


def percent(summary: Summary, places: int = 2) -> str:
    """'83.12 ± 2.04': a fraction's mean and standard deviation in per cent."""
    return plus_minus(summary.mean, summary.std, places, 100)


def plus_minus(mean: float | None, spread: float | None, places: int, scale: float = 1) -> str:
    if mean is None:
        return "-"
    text = f"{round(scale * mean, places) + 0.0:.{places}f}"  # + 0.0: no "-0.0"
    return text if spread is None else f"{text} ± {scale * spread:.{places}f}"


def signed(value: float, places: int) -> str:
    return f"{round(value, places) + 0.0:+.{places}f}"


def definitions(groups: Iterable[Group]) -> str:
    """What the measures are."""
    return DEFINITIONS if all(group.classified for group in groups) else f"{DEFINITIONS} {OTHERS}"


def score(line: Line, measure: str | None = None, places: int | None = None) -> str:
    """The score of a result, or a measure in its unit, such as forgetting."""
    kind, found = SCORES[line.result.score], line.result.measure(measure or line.result.score)
    return plus_minus(found.mean, found.std, kind.places if places is None else places, kind.scale)


def short_columns(group: Group) -> tuple[str, ...]:
    """The columns of `rows`."""
    if group.classified:
        return ("method", "average accuracy", "forgetting", "NLL", "ECE", "MB", "seconds")
    return ("method", group.score.title, "forgetting", "MB", "seconds")


def rows(group: Group) -> list[tuple[str, ...]]:
    """The rows of a benchmark's short table for a terminal, with the columns of `short_columns`."""
    return [
        (
            line.name,
            score(line, places=1),
            score(line, "forgetting", 1),
            *((plus_minus(line.result.nll.mean, None, 2), percent(line.result.ece, 1)) if group.classified else ()),
            megabytes(line.result),
            f"{line.result.seconds:.1f}",
        )
        for line in group.lines
    ]


def megabytes(result: Result) -> str:
    """What the method keeps between tasks, in MB."""
    return "-" if result.memory_bytes is None else f"{result.memory_bytes / 1e6:.2f}"


def caption(group: Group) -> str:
    """The caption of a benchmark's table: tasks, seeds, data and machine."""
    every = list(dict.fromkeys(seeds(line.result) for line in group.lines))
    data = HELD_OUT if HELD_OUT in group.name else "test data"
    one = max(len(line.result.seeds) for line in group.lines) == 1
    over = f"seed{'s' * (not one)} {every[0]}" if len(every) == 1 else "differing seeds"
    machines = "; ".join(dict.fromkeys(machine(line.result) for line in group.lines))
    tasks = f"{group.tasks} task{'s' * (group.tasks != 1)}"
    return f"{tasks}; {'' if one else 'mean ± standard deviation over '}{over}, on {data}; {machines}"


@dataclass(frozen=True)
class Table:
    """Columns and rows; each row has the labels of the results it shows, and its cells."""

    columns: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]

    def markdown(self) -> str:
        lines = [tuple(map(_plain, self.columns)), ("---",) + ("---:",) * (len(self.columns) - 1)]
        texts = [*lines, *(tuple(_plain(cell) for cell in cells) for _, cells in self.rows)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in texts) + "\n"


def _plain(text: str) -> str:
    """The text with Markdown's special characters escaped."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", " ".join(text.split()))


def full_table(group: Group) -> Table:
    """All measures of a benchmark, with published values and the differences from them if there are any."""
    shown = group.has_published
    name = "average accuracy" if group.classified else group.score.title
    columns = ["method", "seeds", name, *(["published", "difference"] if shown else [])]
    sized = any(line.result.memory_bytes is not None for line in group.lines)
    inferred = any(line.result.inferred_accuracy for line in group.lines)
    generated = any(line.result.sample_uncertainty is not None for line in group.lines)
    more = [*(["task inferred"] if inferred else []), *(["uncertainty of samples"] if generated else [])]
    more += ["MB"] if sized else []
    columns += ["forgetting", *(["NLL", "ECE"] if group.classified else []), *more, "seconds"]
    made = []
    for line in group.lines:
        cells = [line.label, seeds(line.result), score(line)]
        if shown:
            cells += _beside_published(line)
        nll = line.result.nll
        cells += [
            score(line, "forgetting"),
            *([plus_minus(nll.mean, nll.std, 3), percent(line.result.ece)] if group.classified else []),
            *([_inferred(line)] if inferred else []),
            *([_plus_minus(line.result.measure("sample_uncertainty"))] if generated else []),
            *([megabytes(line.result)] if sized else []),
            f"{line.result.seconds:.1f}",
        ]
        made.append(((line.label,), tuple(cells)))
    return Table(tuple(columns), tuple(made))


def _plus_minus(summary: Summary) -> str:
    return plus_minus(summary.mean, summary.std, 2)


def _inferred(line: Line) -> str:
    """The accuracy if the task is inferred, and how: by likelihood if the method has one, otherwise by entropy."""
    found = line.result.inferred_accuracy
    how = next((one for one in ("likelihood", "entropy") if one in found), None)
    return "-" if how is None else f"{percent(found[how])} ({how})"


def _beside_published(line: Line) -> list[str]:
    mean = line.result.average_accuracy.mean
    if line.published is None or mean is None:
        return ["-", "-"]
    last = line.published[-1]
    return [f"{100 * last:.1f}", signed(100 * (mean - last), 1)]


def main_table(groups: Iterable[Group]) -> Table:
    """The score after the last task, published values in brackets: a row per method, a column per benchmark."""
    groups = list(groups)
    made = []
    for label in series(groups):
        cells = [label]
        for group in groups:
            line = next((line for line in group.lines if line.label == label), None)
            cell = "-" if line is None else score(line)
            cells.append(f"{cell} ({100 * line.published[-1]:.1f})" if line and line.published else cell)
        made.append(((label,), tuple(cells)))
    names = [group.name if group.classified else f"{group.name}: {group.score.title}" for group in groups]
    return Table(("method", *names), tuple(made))


def main_title(groups: Iterable[Group]) -> str:
    """The title of `main_table`."""
    labels = {group.score.label for group in groups}
    what = labels.pop() if len(labels) == 1 else "average score"
    return f"{what[0].upper()}{what[1:]} after the last task"


def paired_note(group: Group, label: str) -> str:
    """What the numbers of `paired_table` are."""
    unit = {"%": ", in percentage points", "": ""}.get(group.score.unit, f", in {group.score.unit}")
    return PAIRED.format(score=group.score.label, unit=unit, label=label)


def reference(group: Group) -> Line | None:
    """The result that the others are compared with: the first one of EVCL."""
    return next((line for line in group.lines if line.result.method == REFERENCE), None)


def paired_difference(a: Line, b: Line) -> tuple[list[int], float, float | None]:
    """(common seeds, mean difference, its standard error) of the score, a minus b; accuracies are fractions.

    The error is sd / sqrt(n) of the seeds' differences (n - 1 in the deviation); None for a single seed.
    """
    values = [
        {seed: value for seed, value in zip(r.seeds, r.measure(r.score).per_seed, strict=True) if value is not None}
        for r in (a.result, b.result)
    ]
    common = sorted(values[0].keys() & values[1].keys())
    differences = np.array([values[0][seed] - values[1][seed] for seed in common])
    if not common:
        return common, float("nan"), None
    error = float(differences.std(ddof=1) / np.sqrt(len(common))) if len(common) > 1 else None
    return common, float(differences.mean()), error


def paired_table(group: Group) -> Table | None:
    """EVCL minus each other method, over their common seeds; None without EVCL or without another method."""
    first = reference(group)
    others = [line for line in group.lines if line is not first]
    if first is None or not others:
        return None
    made = []
    for line in others:
        common, mean, error = paired_difference(first, line)
        scale, places = group.score.scale, group.score.places
        text = "no common seed" if not common else signed(scale * mean, places)
        text += "" if error is None else f" ± {scale * error:.{places}f}"
        made.append(((first.label, line.label), (line.label, text, str(len(common)))))
    return Table((f"{first.label} minus", "difference ± standard error", "common seeds"), tuple(made))


def tables_markdown(groups: Iterable[Group], title: str) -> str:
    """All tables of a report as Markdown, with definitions of the measures and the command for each run."""
    groups = list(groups)
    some = any(group.has_published for group in groups)
    parts = [
        f"# {_plain(title)}",
        definitions(groups),
        f"## {main_title(groups)}",
        main_table(groups).markdown(),
    ]
    parts += [BRACKETS] if some else []
    for group in groups:
        parts += [f"## {_plain(group.name)}", full_table(group).markdown(), _sentence(caption(group))]
        paired, first = paired_table(group), reference(group)
        if paired is not None and first is not None:
            parts += [
                f"### {_plain(first.label)} against the others",
                paired.markdown(),
                paired_note(group, _plain(first.label)),
            ]
        parts += ["```\n" + "\n".join(" ".join(command(line.result).split()) for line in group.lines) + "\n```"]
    if some:
        parts += ["## About the published values", *WHY]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _sentence(text: str) -> str:
    return _plain(text[0].upper() + text[1:] + ".")
