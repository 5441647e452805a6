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
from statistics import mean, stdev

from evcl._core.files import in_lines
from evcl.experiments import PAPER_BENCHMARKS, PAPER_METHODS, RESULT, Summary, best_trial
from evcl.experiments.search import Trial
from evcl.report import Group, Line, by_benchmark, find_results, full_table, main_table, paired_difference, percent
from evcl.report.figures import save_figure, score_figure

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results"
SEARCHES = HERE / "search"
DOCUMENTS = [HERE / "README.md", ROOT / "docs" / "RESULTS.md", ROOT / "README.md"]
FIGURES = ROOT / "docs" / "figures"
STREAMS = {"mnist": "MNIST", "notmnist": "notMNIST", "fashion": "Fashion-MNIST", "cifar": "CIFAR-10 grey"}


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
    methods = {line.result.method: line.label for group in found for line in group.lines}
    rows = []
    for method, label in methods.items():
        if method != "evcl":
            lines = [(group, next((x for x in group.lines if x.result.method == method), None)) for group in found]
            rows.append([label, *("-" if line is None else difference(of(g, "evcl"), line) for g, line in lines)])
    return table(["EVCL minus", *(group.name for group in found)], rows)


def forms(name: str) -> str:
    """EVCL with its tuned settings, by its defaults, and of version 0.1, on the same seeds."""
    rows = {
        "EVCL, tuned": groups(name),
        "EVCL, defaults": groups("default"),
        "EVCL of version 0.1, tuned": groups("before"),
    }
    return compared(
        {label: [of(g, "evcl") for g in some] for label, some in rows.items()}, [g.name for g in groups(name)]
    )


def compared(rows: dict[str, list[Line]], columns: Sequence[str]) -> str:
    """The accuracy of each row; then the first row minus each other."""
    first = next(iter(rows))
    cells = [[label, *(percent(line.result.average_accuracy) for line in lines)] for label, lines in rows.items()]
    for label in list(rows)[1:]:
        cells.append([f"{first} minus {label}", *map(difference, rows[first], rows[label])])
    return table(["method", *columns], cells)


def streams(name: str) -> str:
    """Accuracy on random streams: points below `joint` with their deviation, and on the worst stream; the mean NLL."""
    found = json.loads((RESULTS / "laws" / f"{name}.json").read_text("utf-8"))
    accuracy, nll = found["accuracy"], found.get("nll", {})
    labels = dict.fromkeys(label for each in accuracy.values() for label in each if label != "joint")
    rows = []
    for label in labels:
        method, _, how = label.partition(", ")
        cells = [f"`{method}`, {how or 'defaults'}"]
        for data, each in accuracy.items():
            below = [j - a for j, a in zip(each["joint"], each[label], strict=True)] if label in each else []
            of = f"; {mean(nll[data][label]):.3f}" if label in nll.get(data, {}) else ""
            cells.append(f"{mean(below):.2f} ± {stdev(below):.2f} ({max(below):.2f}){of}" if below else "-")
        rows.append(cells)
    return table(["points below joint", *(STREAMS[data] for data in accuracy)], rows)


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
    """EVCL and LwF, beside EVCL of version 0.1, on seeds that none of them had met."""
    found, before = groups(name), groups(f"{name}-before")
    rows = {
        "EVCL": [of(g, "evcl") for g in found],
        "LwF": [of(g, "lwf") for g in found],
        "EVCL of version 0.1": [of(g, "evcl") for g in before],
    }
    return compared(rows, [g.name for g in found])


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
    "main": main, "paired": paired, "forms": forms, "details": details, "streams": streams,
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
    save_figure(score_figure(group), path, json.dumps(shown))
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
