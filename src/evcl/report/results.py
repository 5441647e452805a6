"""Read and check result files, group comparable results, and put them in the order of tables and figures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evcl._core.catalogue import BENCHMARK_SUMMARIES, METHOD_SUMMARIES
from evcl._core.errors import EvclError
from evcl.experiments import CELLS, RESULT, Result, merge
from evcl.experiments.known import known_benchmark, known_method
from evcl.experiments.result import SCORES, Score
from evcl.metrics import accuracy_curve
from evcl.report.published import Curve, published
from evcl.report.styles import METHOD_NAMES, STYLES, Style, assign

Floats = NDArray[np.float64]
HELD_OUT = "held-out data"
IN_NAMES = {"tempering", "forgetting", "rehearsal", "coreset"}  # these a label leaves out
METHOD_ORDER = [*STYLES, *METHOD_SUMMARIES]


@dataclass(frozen=True)
class Line:
    """A result as displayed: a line in a figure, a row in a table."""

    label: str  # the same in every figure and table
    name: str  # the label with the method's name as typed on the command line
    style: Style
    result: Result
    published: Curve | None

    @property
    def matrices(self) -> Floats:
        """[seed, after task t, on task k]: the result's score; NaN if not measured."""
        return np.array(self.result.matrices, dtype=np.float64)

    @property
    def curves(self) -> Floats:
        """[seed, after task t]: the average score over the tasks seen so far."""
        return np.array([accuracy_curve(matrix) for matrix in self.matrices])

    @property
    def curve(self) -> tuple[Floats, Floats]:
        """Mean and standard deviation over the seeds, [tasks] each, of the average score after each task.

        NaN if not measured (joint training has only its last point); with one seed, the deviation is NaN.
        """
        rows = self.curves
        spread = rows.std(0, ddof=1) if len(rows) > 1 else np.full(rows.shape[1], np.nan)
        return rows.mean(0), spread


@dataclass(frozen=True)
class Group:
    """Results that can be compared: same benchmark, same number of tasks, same score, and measured on the same data."""

    name: str
    slug: str  # the name as used in file names
    lines: tuple[Line, ...]

    @property
    def tasks(self) -> int:
        return self.lines[0].result.tasks

    @property
    def is_stream(self) -> bool:
        """Whether these are results of a stream of rows, which has no tasks."""
        return self.lines[0].result.prequential is not None

    @property
    def scenario_name(self) -> str:
        """'class scenario', or 'default scenario' for the benchmark as it is registered."""
        return f"{self.lines[0].result.config.get('scenario') or 'default'} scenario"

    @property
    def score(self) -> Score:
        """What the benchmark is judged by."""
        return SCORES[self.lines[0].result.score]

    @property
    def classified(self) -> bool:
        """Whether it is judged by the accuracy of classes."""
        return self.score is SCORES["average_accuracy"]

    @property
    def has_published(self) -> bool:
        return any(line.published for line in self.lines)


def find_results(folder: Path) -> list[Result]:
    """Every result below a folder, except in hidden folders; the seeds of a sweep's cells are merged."""
    from evcl.experiments import read_result

    if not folder.is_dir():
        raise EvclError(f"there is no folder {folder}")
    paths = sorted(path for path in folder.rglob(RESULT) if not _hidden(path.relative_to(folder)))
    if not paths:
        raise EvclError(f"{folder} has no {RESULT}: make one with evcl run")
    results = [(path, read_result(path)) for path in paths]
    for path, result in results:
        if result.matrices is None and result.prequential is None:
            raise EvclError(f"{path} has no accuracy or other score, which a report needs: move it elsewhere")
    cells = [result for path, result in results if path.parent.parent.name == CELLS]
    return [result for path, result in results if path.parent.parent.name != CELLS] + _joined(cells)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _joined(cells: Sequence[Result]) -> list[Result]:
    """Merge results of single seeds that have the same configuration and machine."""
    groups: dict[object, dict[int, Result]] = {}
    for cell in cells:
        config = json.dumps(cell.config, sort_keys=True)
        same = (cell.benchmark, cell.method, cell.preset, config, cell.environment)
        groups.setdefault(same, {})[cell.seeds[0]] = cell
    return [merge([group[seed] for seed in sorted(group)]) for group in groups.values()]


def by_benchmark(results: Sequence[Result]) -> dict[str, Group]:
    """Groups of comparable results, by name: benchmarks in the order of `evcl list`, methods in the paper's order."""
    order = list(BENCHMARK_SUMMARIES)
    keys = sorted({_key(r) for r in results}, key=lambda key: (_place(key[0], order), key[1:]))
    in_order = sorted(results, key=lambda r: (_place(r.name, METHOD_ORDER), r.preset != "tuned"))
    members = {key: [r for r in in_order if _key(r) == key] for key in keys}
    names = {id_: name for id_, name in METHOD_NAMES.items() if name not in {r.name for r in results}}
    suffixes = {key: [_suffix(r, group) for r in group] for key, group in members.items()}
    labels = {
        key: [
            " + ".join([names.get(r.name, r.name), *(part for part in r.parts if part not in IN_NAMES)]) + suffix
            for r, suffix in zip(group, suffixes[key], strict=True)
        ]
        for key, group in members.items()
    }
    pairs = [(label, r.name) for key in keys for label, r in zip(labels[key], members[key], strict=True)]
    styles = assign(sorted(pairs, key=lambda pair: _place(pair[1], METHOD_ORDER)))
    groups: dict[str, Group] = {}
    slugs: set[str] = set()
    for key, group in members.items():
        lines = (
            Line(label, result.name + suffix, styles[label], result, _published(key, result))
            for label, suffix, result in zip(labels[key], suffixes[key], group, strict=True)
        )
        name = _name(key)
        groups[name] = Group(name, _slug(name, slugs), tuple(lines))
    return groups


def series(groups: Iterable[Group]) -> dict[str, Style]:
    """Every label of a report, in the order of its tables."""
    lines = [line for group in groups for line in group.lines]
    lines.sort(key=lambda line: _place(line.result.name, METHOD_ORDER))
    return {line.label: line.style for line in lines}


Key = tuple[str, int, float, int, str]  # benchmark, number of tasks, fraction held out; of a stream, its rows; scenario


def _key(result: Result) -> Key:
    rows = 0 if result.prequential is None else result.prequential.rows
    return result.benchmark, result.tasks, result.validation, rows, str(result.config.get("scenario", ""))


def _place(name: str, order: list[str]) -> tuple[int, str]:
    return (order.index(name) if name in order else len(order), name)


def _name(key: Key) -> str:
    """The benchmark's name, plus the number of tasks, the scenario and the held-out fraction if they are not the
    default; of a stream, plus the number of its rows.
    """
    benchmark, tasks, validation, rows, scenario = key
    known = known_benchmark(benchmark)
    usual = 5 if known is None else known.tasks
    parts = [benchmark]
    if rows:
        parts.append(f"{rows:,} rows")
    elif tasks != usual:
        parts.append(f"{tasks} task{'s' * (tasks != 1)}")
    if scenario:
        parts.append(f"{scenario} scenario")
    if validation:
        parts.append(f"{HELD_OUT} ({validation:g})")
    return ", ".join(parts)


def _slug(name: str, taken: set[str]) -> str:
    """A file name, never a path, that no other group has."""
    plain = file_name(name) or "benchmark"
    slug, number = plain, 2
    while slug.lower() in taken:
        slug, number = f"{plain}-{number}", number + 1
    taken.add(slug.lower())
    return slug


def file_name(name: str) -> str:
    """The name as a part of a file name, never a path."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-.")[:80]


def _published(key: Key, result: Result) -> Curve | None:
    """The published curve of this method on this benchmark; None if the method is changed by a coreset that the
    published one did not have, or if the scenario is another.
    """
    benchmark, tasks, validation, _, scenario = key
    curve = published().get((benchmark, result.method))
    method = known_method(benchmark, result.method)
    usual = None if method is None else method.known_settings.get("coreset")
    changed = usual is not None and result.config.get("coreset", usual.default) != usual.default
    return curve if curve and len(curve) == tasks and not (validation or scenario or changed) else None


def scenarios(groups: Iterable[Group]) -> dict[str, list[Group]]:
    """The groups that show one benchmark in several scenarios, by the benchmark's name."""
    grouped: dict[tuple[str, int, float], list[Group]] = {}
    for group in groups:
        first = group.lines[0].result
        if not group.is_stream:
            grouped.setdefault((first.benchmark, first.tasks, first.validation), []).append(group)
    several = {key: some for key, some in grouped.items() if len(some) > 1}
    names = [key[0] for key in several]
    return {
        name if names.count(name) == 1 else f"{name}, {tasks} tasks, {validation:.0%} held out": some
        for (name, tasks, validation), some in several.items()
    }


def _suffix(result: Result, group: Sequence[Result]) -> str:
    """The suffix that tells several results of one method apart: the preset, settings that differ, or a number."""
    same = [r for r in group if r.name == result.name]
    return "" if len(same) == 1 else f" ({_distinction(result, same)})"


def _distinction(result: Result, same: Sequence[Result]) -> str:
    if len({r.preset for r in same}) == len(same):
        return result.preset
    names = sorted({name for r in same for name in r.config})
    differing = [name for name in names if len({repr(r.config.get(name)) for r in same}) > 1]
    # a memory brings several settings, of which one is enough to name it
    lacking = [name for name in differing if any(name not in r.config for r in same)]
    differing = [name for name in differing if name not in lacking] + lacking[:1]

    def word(r: Result, name: str) -> str:
        return f"{name}={r.config[name]}" if name in r.config else f"no {name}"

    words = [", ".join(word(r, name) for name in differing) for r in same]
    position = next(i for i, r in enumerate(same) if r is result)
    if len(set(words)) == len(same) and max(map(len, words)) <= 40:
        return words[position]
    return str(position + 1)
