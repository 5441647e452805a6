"""The tables of results of tasks, for a terminal, for Markdown and for the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from evcl.experiments import Result, Summary
from evcl.experiments.result import SCORES
from evcl.report.cells import Cell, Column, Find, Table, best, best_note, escaped, paired, plus_minus
from evcl.report.published import WORDS
from evcl.report.results import HELD_OUT, Group, Line, series
from evcl.report.runs import command, machine, seeds

REFERENCE = "evcl"


def percent(summary: Summary, places: int = 2) -> Cell:
    """'83.12 ± 2.04': a fraction's mean and standard deviation in per cent."""
    return plus_minus(summary.mean, summary.std, places, 100)


def signed(value: float, places: int) -> str:
    return f"{round(value, places) + 0.0:+.{places}f}"


def definitions(groups: Iterable[Group]) -> str:
    """What the measures are."""
    every = all(group.classified for group in groups)
    return WORDS["definitions"] if every else f"{WORDS['definitions']} {WORDS['others']}"


def score(line: Line, measure: str | None = None, places: int | None = None) -> str:
    """The score of a result, or a measure in its unit, such as forgetting."""
    kind, summary = SCORES[line.result.score], line.result.measure(measure or line.result.score)
    return plus_minus(summary.mean, summary.std, kind.places if places is None else places, kind.scale)


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
    data = HELD_OUT if HELD_OUT in group.name else "new episodes" if group.score.matrices == "returns" else "test data"
    one = max(len(line.result.seeds) for line in group.lines) == 1
    over = f"seed{'s' * (not one)} {every[0]}" if len(every) == 1 else "differing seeds"
    machines = "; ".join(dict.fromkeys(machine(line.result) for line in group.lines))
    tasks = f"{group.tasks} task{'s' * (group.tasks != 1)}"
    return f"{tasks}; {'' if one else 'mean ± standard deviation over '}{over}, on {data}; {machines}"


def full_table(group: Group, every: bool = False) -> Table:
    """All measures of a benchmark, with published values and the differences from them if there are any; with `every`,
    also those that documents leave out.
    """
    lines, score_ = group.lines, group.score
    name = "average accuracy" if group.classified else score_.title
    columns = [Column("method", [line.label for line in lines]), Column("seeds", [seeds(x.result) for x in lines])]

    def add(title: str, measure: str, better: int, unit: str = score_.unit, scale: float = score_.scale,
            places: int = score_.places) -> None:  # fmt: skip
        columns.append(Column(title, _cells(lines, lambda x: x.result.measure(measure), better, places, scale), unit))

    add(name, lines[0].result.score, 1, score_.unit if group.classified else "")
    if group.has_published:
        for i, title in enumerate(("published", "difference")):
            columns.append(Column(title, [_beside_published(line)[i] for line in lines], ("%", "points")[i]))
    add("forgetting", "forgetting", -1)
    if every:
        add("backward transfer", "backward_transfer", 1)
    if group.classified:
        add("NLL", "nll", -1, "nats", 1.0, 3)
        add("ECE", "ece", -1, "%", 100.0, 2)
    if any(line.result.inferred_accuracy for line in lines):
        columns.append(Column("task inferred", [_inferred(line) for line in lines], "%"))
    if any(line.result.sample_uncertainty is not None for line in lines):
        add("uncertainty of samples", "sample_uncertainty", -1, "nats", 1.0, 2)
    if any(line.result.memory_bytes is not None for line in lines):
        columns.append(Column("MB", [megabytes(line.result) for line in lines]))
    columns.append(Column("seconds", [f"{line.result.seconds:.1f}" for line in lines]))
    return Table.of(columns, [line.label for line in lines])


def _cells(lines: Sequence[Line], find: Find, better: int, places: int, scale: float) -> list[Cell]:
    """A measure of each line, the best marked."""
    marked, cells = best(lines, find, better), []
    for line in lines:
        summary = find(line) or Summary(None, None, [])
        cells.append(plus_minus(summary.mean, summary.std, places, scale, line.label in marked))
    return cells


def _inferred(line: Line) -> str:
    """The accuracy if the task is inferred, and how: by likelihood if the method has one, otherwise by entropy."""
    accuracies = line.result.inferred_accuracy
    how = next((one for one in ("likelihood", "entropy") if one in accuracies), None)
    if how is None:
        return "-"
    cell = percent(accuracies[how])
    return Cell(f"{cell} ({how})", cell.mean, cell.std)


def _beside_published(line: Line) -> tuple[str, str]:
    mean = line.result.average_accuracy.mean
    if line.published is None or mean is None:
        return "-", "-"
    last = line.published[-1]
    return f"{100 * last:.1f}", signed(100 * (mean - last), 1)


def main_table(groups: Iterable[Group]) -> Table:
    """The score after the last task, published values in brackets: a row per method, a column per benchmark."""
    groups = list(groups)
    labels = list(series(groups))
    columns = [Column("method", labels)]
    for group in groups:
        kind, lines = group.score, {line.label: line for line in group.lines}
        cells = _cells(group.lines, lambda x: x.result.measure(x.result.score), 1, kind.places, kind.scale)
        by_label = {line.label: _bracketed(line, cell) for line, cell in zip(group.lines, cells, strict=True)}
        name = group.name if group.classified else f"{group.name}: {kind.title}"
        unit = kind.unit if group.classified else ""
        columns.append(Column(name, [by_label[label] if label in lines else Cell("-") for label in labels], unit))
    return Table.of(columns, labels)


def _bracketed(line: Line, cell: Cell) -> Cell:
    if not line.published:
        return cell
    return Cell(f"{cell} ({100 * line.published[-1]:.1f})", cell.mean, cell.std, cell.best)


def scenario_table(groups: Sequence[Group]) -> Table:
    """The score after the last task in each scenario of one benchmark: a row per method, a column per scenario."""
    table = main_table(groups)
    return Table(("method", *(group.scenario_name for group in groups)), table.rows, table.units)


def matrix_table(group: Group) -> Table:
    """The score on each task after each task: a row per method, task learned and task measured."""
    made = []
    for line in group.lines:
        values = group.score.scale * line.matrices
        spread = values.std(0, ddof=1) if len(values) > 1 else None
        names = line.result.task_names or [str(k + 1) for k in range(group.tasks)]
        for t, k in zip(*np.tril_indices(group.tasks), strict=True):
            mean = float(values[:, t, k].mean())
            if np.isfinite(mean):
                std = None if spread is None else float(spread[t, k])
                cell = plus_minus(mean, std, group.score.places)
                made.append(((line.label,), (line.label, str(names[t]), str(names[k]), cell)))
    return Table(("method", "after task", "on task", group.score.of_task), tuple(made), ("", "", "", group.score.unit))


def main_title(groups: Iterable[Group]) -> str:
    """The title of `main_table`."""
    labels = {group.score.label for group in groups}
    what = labels.pop() if len(labels) == 1 else "average score"
    return f"{what[0].upper()}{what[1:]} after the last task"


def paired_note(group: Group, label: str) -> str:
    """What the numbers of `paired_table` are."""
    unit = {"%": ", in percentage points", "": ""}.get(group.score.unit, f", in {group.score.unit}")
    text: str = WORDS["paired"].format(score=group.score.label, unit=unit, label=label)
    return text


def reference(group: Group) -> Line | None:
    """The result that the others are compared with: the first one of EVCL."""
    return next((line for line in group.lines if line.result.method == REFERENCE), None)


def paired_difference(a: Line, b: Line) -> tuple[list[int], float, float | None]:
    """(common seeds, mean difference, its standard error) of the score, a minus b; accuracies are fractions."""
    return paired(a, b, lambda line: line.result.measure(line.result.score))


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
        cell = Cell(text, scale * mean if common else None, None if error is None else scale * error)
        made.append(((first.label, line.label), (line.label, cell, str(len(common)))))
    return Table((f"{first.label} minus", "difference ± standard error", "common seeds"), tuple(made))


def tables_markdown(groups: Iterable[Group], title: str) -> str:
    """All tables of a report as Markdown, with definitions of the measures and the command for each run."""
    groups = list(groups)
    some = any(group.has_published for group in groups)
    parts = [
        f"# {escaped(title)}",
        definitions(groups),
        f"## {main_title(groups)}",
        main_table(groups).markdown(mark=True),
        best_note(line for group in groups for line in group.lines),
    ]
    parts += [WORDS["brackets"]] if some else []
    for group in groups:
        parts += [
            f"## {escaped(group.name)}",
            full_table(group, every=True).markdown(mark=True),
            _sentence(caption(group)),
        ]
        paired, first = paired_table(group), reference(group)
        if paired is not None and first is not None:
            parts += [
                f"### {escaped(first.label)} against the others",
                paired.markdown(),
                paired_note(group, escaped(first.label)),
            ]
        parts += ["```\n" + "\n".join(" ".join(command(line.result).split()) for line in group.lines) + "\n```"]
    if some:
        parts += ["## About the published values", *WORDS["why"]]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _sentence(text: str) -> str:
    return escaped(text[0].upper() + text[1:] + ".")
