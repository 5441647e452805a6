"""Make the tables and figures of the documents from the result files here: `python experiments/paper/make_tables.py`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. A figure's file holds the numbers that it shows. The
tests check that both are as this makes them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path

from evcl._core.files import in_lines
from evcl.experiments import PAPER_BENCHMARKS, PAPER_METHODS, RESULT, Summary, best_trial, read_result
from evcl.experiments.search import Trial
from evcl.report import Group, Line, by_benchmark, find_results, full_table, main_table, paired_difference, percent
from evcl.report.figures import accuracy_figure, save_figure

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results"
SEARCHES = HERE / "search"
DOCUMENTS = [HERE / "README.md", ROOT / "docs" / "RESULTS.md", ROOT / "README.md"]
FIGURES = ROOT / "docs" / "figures"
AIMS = {  # per cent: one recipe for all, and the settings of each benchmark
    "permuted-mnist": (95.0, 96.0),
    "split-mnist": (99.5, 99.7),
    "split-notmnist": (96.0, 97.0),
    "split-fashion-mnist": (98.0, 99.1),
    "split-cifar10": (77.0, 78.5),
}
TEN_TASKS = 94.0


def groups(name: str) -> list[Group]:
    """The results of a folder, in the paper's order."""
    found = by_benchmark(find_results(RESULTS / name)).values()
    order = {benchmark: i for i, benchmark in enumerate(PAPER_BENCHMARKS)}
    return sorted(found, key=lambda group: order.get(group.lines[0].result.benchmark, len(order)))


def of(group: Group, method: str) -> Line:
    return next(line for line in group.lines if line.result.method == method)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(name: str) -> str:
    return main_table(groups(name)).markdown()


def difference(a: Line, b: Line) -> str:
    """In points; bold where it is larger than its standard error."""
    _, mean, error = paired_difference(a, b)
    text = f"{100 * mean:+.2f} ± {100 * (error or 0):.2f}".replace("-", "\N{MINUS SIGN}")
    return f"**{text}**" if abs(mean) > (error or 0) else text


def paired(name: str) -> str:
    """EVCL minus each other method."""
    found = groups(name)
    rows = []
    for method in PAPER_METHODS[1:]:
        cells = [of(found[0], method).label]
        for group in found:
            cells.append(difference(of(group, "evcl"), of(group, method)))
        rows.append(cells)
    return table(["EVCL minus", *(group.name for group in found)], rows)


def aims(name: str) -> str:
    """EVCL beside what was hoped for."""
    rows = []
    for benchmark, wanted in AIMS.items():
        cells = [f"`{benchmark}`"]
        for folder, aim in zip(("recipe", "tuned"), wanted, strict=True):
            summary = next(
                of(g, "evcl").result.average_accuracy
                for g in groups(folder)
                if g.lines[0].result.benchmark == benchmark
            )
            cells += [f"{aim:.1f}", beside(aim, summary)]
        rows.append(cells)
    ten = read_result(RESULTS / "ten-tasks" / "evcl" / RESULT).average_accuracy
    reached = beside(TEN_TASKS, ten)
    rows.append(["`permuted-mnist`, 10 tasks", "", "", f"{TEN_TASKS:.1f}", reached])
    return table(["", "aim, one recipe", "one recipe", "aim, tuned", "tuned"], rows)


def beside(aim: float, summary: Summary) -> str:
    """What was reached, and whether that is less than the aim."""
    return f"{percent(summary)}{'' if 100 * (summary.mean or 0) >= aim else ' (missed)'}"


def coresets(name: str) -> str:
    """EVCL and VCL with and without coresets, the settings those of `tuned`; then EVCL minus VCL, both with one."""
    tuned, own = groups("tuned"), groups(name)
    ours = {
        f"EVCL + {label}": [next(x for x in g.lines if x.result.config["coreset"] == kind) for g in own]
        for kind, label in (("random", "random coreset"), ("kcenter", "k-center coreset"))
    }
    theirs = {
        of(tuned[0], method).label: [of(g, method) for g in tuned]
        for method in ("vcl-random-coreset", "vcl-kcenter-coreset")
    }
    rows = {"EVCL": [of(g, "evcl") for g in tuned], **ours, **theirs, "joint": [of(g, "joint") for g in tuned]}
    cells = [[label, *(percent(x.result.average_accuracy) for x in lines)] for label, lines in rows.items()]
    for a, b in product(ours, theirs):
        cells.append([f"{a} minus {b}", *(difference(x, y) for x, y in zip(ours[a], theirs[b], strict=True))])
    return table(["method", *(g.name for g in tuned)], cells)


def again(name: str) -> str:
    """EVCL and LwF with the last settings, beside EVCL of version 0.1, on seeds that none of them had met."""
    found, before = groups(name), groups(f"{name}-before")
    rows = {
        "EVCL": [of(g, "evcl") for g in found],
        "LwF": [of(g, "lwf") for g in found],
        "EVCL of version 0.1": [of(g, "evcl") for g in before],
    }
    cells = [[label, *(percent(line.result.average_accuracy) for line in lines)] for label, lines in rows.items()]
    for label in list(rows)[1:]:
        cells.append(
            [f"EVCL minus {label}", *(difference(a, b) for a, b in zip(rows["EVCL"], rows[label], strict=True))]
        )
    return table(["method", *(g.name for g in found)], cells)


def details(name: str) -> str:
    return "\n\n".join(f"### {group.name}\n\n{full_table(group).markdown().strip()}" for group in groups(name))


def measured(trial: Trial) -> Summary:
    return Summary(trial["mean"], trial["std"], list(trial["per_seed"]))


def confirmed(name: str) -> str:
    """The validation accuracy of what was chosen, in the last round that measured it with seeds of its own."""
    found: dict[tuple[str, str], Trial] = {}
    for path in sorted(SEARCHES.glob(f"{name}*/*.json")):
        one = json.loads(path.read_text("utf-8"))
        found |= {(one["benchmark"], method): best_trial(one, method) for method in one.get("confirmed", {})}
    methods = dict.fromkeys([*PAPER_METHODS, *(method for _, method in found)])
    rows = [
        [method, *(percent(measured(found[b, method])) if (b, method) in found else "-" for b in PAPER_BENCHMARKS)]
        for method in methods
    ]
    return table(["method", *PAPER_BENCHMARKS], rows)


def architectures(name: str) -> str:
    """Accuracy after the last task, forgetting in brackets: a column a network; then EVCL minus the others."""
    found = groups(name)
    methods = [line.result.method for line in found[0].lines]
    rows = []
    for method in methods:
        cells = [of(found[0], method).label]
        for group in found:
            line = of(group, method)
            forgetting = line.result.forgetting.mean
            lost = "" if forgetting is None else f" ({100 * forgetting:.1f})"
            cells.append(f"{percent(line.result.average_accuracy)}{lost}")
        rows.append(cells)
    for method in methods:
        if method not in ("evcl", "joint"):
            cells = [difference(of(group, "evcl"), of(group, method)) for group in found]
            rows.append([f"EVCL minus {of(found[0], method).label}", *cells])
    return table(["method", *(group.name for group in found)], rows)


KINDS: dict[str, Callable[[str], str]] = {
    "main": main, "paired": paired, "aims": aims, "details": details,
    "architectures": architectures, "coresets": coresets, "confirmed": confirmed, "again": again,
}  # fmt: skip


TABLE = re.compile(r"<!-- table: ([\w /-]+) -->\n.*?<!-- end -->", re.DOTALL)


def filled(text: str) -> str:
    """A document with its tables made anew."""

    def made(match: re.Match[str]) -> str:
        kind, _, name = match[1].partition(" ")
        return f"<!-- table: {match[1]} -->\n\n{KINDS[kind](name).strip()}\n\n<!-- end -->"

    return TABLE.sub(made, text)


def draw(group: Group, folder: Path) -> Path:
    """Draw the curves of a benchmark, in a file that says which numbers they show."""

    def numbers(values: Iterable[float]) -> list[float | None]:
        return [round(100 * value, 4) if math.isfinite(value) else None for value in values]

    shown = {}
    for line in group.lines:
        mean, spread = line.curve
        shown[line.label] = {"mean": numbers(mean), "std": numbers(spread), "published": numbers(line.published or [])}
    path = folder / f"{group.slug}.svg"
    save_figure(accuracy_figure(group), path, json.dumps(shown))
    return path


def kept(text: str) -> str:
    """A result file as it is kept here, one line per key: `evcl` writes one per number."""
    return f"{in_lines(json.loads(text), 1)}\n"


if __name__ == "__main__":
    for path in RESULTS.rglob(RESULT):
        path.write_text(kept(path.read_text("utf-8")), "utf-8")
    for path in DOCUMENTS:
        path.write_text(filled(path.read_text("utf-8")), "utf-8")
    for group in groups("tuned"):
        draw(group, FIGURES)
