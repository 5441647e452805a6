"""Write the tables of the field into docs/RESULTS.md, from the files in `results/`.

    python experiments/field/write_tables.py

They stand between `<!-- field -->` and `<!-- end field -->`. The tests check that they are as this writes them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from field import BENCHMARKS, HERE, SCENARIOS, about

from evcl._core.files import in_lines
from evcl.experiments import RESULT, Summary
from evcl.experiments.compare import between, place
from evcl.experiments.result import summarise
from evcl.methods import METHODS
from evcl.metrics import learning_accuracy
from evcl.report import Group, Line, by_benchmark, find_results, paired_difference, percent
from evcl.report.cells import plus_minus
from evcl.report.tables import reference

RESULTS = HERE / "results"
DOCUMENT = HERE.parents[1] / "docs" / "RESULTS.md"
TEXTS = HERE.parent / "text" / "results"
COLUMNS = ("accuracy", "EVCL minus", "forgetting", "learning accuracy", "NLL", "ECE", "MB", "seconds")


def groups(folder: Path, benchmarks: Sequence[str]) -> dict[str, Group]:
    """The results of each of these that has some."""
    found = {}
    for benchmark in benchmarks:
        if any((folder / place(benchmark)).glob(f"*/{RESULT}")):
            ((_, found[benchmark]),) = by_benchmark(find_results(folder / place(benchmark))).items()
    return found


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def lines(group: Group) -> list[Line]:
    """The methods in the order of `evcl list`."""
    order = list(METHODS)
    return sorted(group.lines, key=lambda line: order.index(line.result.method))


def grid(found: dict[str, Group]) -> tuple[dict[tuple[str, str], Line], dict[str, str], list[list[str]]]:
    """The result of each benchmark and method, the methods' labels, and a row of accuracies per method."""
    cells = {(b, line.result.method): line for b, group in found.items() for line in lines(group)}
    labels = {line.result.method: line.label for line in cells.values()}
    rows = []
    for method in (name for name in METHODS if name in labels):
        each = (cells.get((benchmark, method)) for benchmark in found)
        rows.append([labels[method], *("-" if x is None else percent(x.result.average_accuracy) for x in each)])
    return cells, labels, rows


def overview(found: dict[str, Group]) -> str:
    """The accuracy of every method on every benchmark."""
    return table(["method", *(group.name for group in found.values())], grid(found)[2])


def difference(a: Line, b: Line) -> str:
    """In points; bold if it is larger than twice its standard error."""
    _, mean, error = paired_difference(a, b)
    text = f"{100 * mean:+.2f} ± {100 * (error or 0):.2f}".replace("-", "\N{MINUS SIGN}")
    return f"**{text}**" if abs(mean) > 2 * (error or 0) else text


def learned(line: Line) -> Summary:
    return summarise([learning_accuracy(matrix) for matrix in line.matrices])


def details(group: Group, kept: dict[str, int]) -> str:
    """Every measure on one benchmark."""
    first = reference(group)
    rows = []
    for line in lines(group):
        result, method = line.result, METHODS[line.result.method]
        size = "all data" if method.jointly else f"{kept[method.name] / 1e6:.2f}" if method.name in kept else "-"
        rows.append(
            [
                line.label,
                percent(result.average_accuracy),
                "-" if first is None or line is first else difference(first, line),
                percent(result.forgetting),
                percent(learned(line)),
                plus_minus(result.nll.mean, result.nll.std, 3),
                percent(result.ece),
                size,
                f"{result.seconds / len(result.seeds):.1f}",
            ]
        )
    return table(["method", *COLUMNS], rows)


def made(folder: Path = RESULTS) -> str:
    """All tables: the overview, then one per benchmark."""
    path = folder / "memory.json"
    kept = json.loads(path.read_text("utf-8")) if path.exists() else {}
    found = groups(folder, BENCHMARKS)
    parts = [overview(found)]
    parts += [f"### {group.name}, every measure\n\n{details(group, kept.get(b, {}))}" for b, group in found.items()]
    return "\n\n".join(parts)


def title(benchmark: str) -> str:
    """A scenario as the head of a column: split-mnist class, 200 kept."""
    own = about(benchmark)
    words = " ".join(
        filter(
            None,
            [own["stream"].replace("permuted-mnist:10", "permuted-mnist-10"), own.get("network"), own.get("scenario")],
        )
    )
    words += f", {own['called']}" if "called" in own else ""
    return f"{words}, {own['memory']:,} kept" if "memory" in own else words


def scenarios(folder: Path = RESULTS) -> str:
    """The accuracy in each scenario, without a memory and with one, and how far EVCL is ahead."""
    parts = []
    for kept in (False, True):
        found = groups(folder, [name for name in SCENARIOS if ("memory" in about(name)) == kept])
        cells, labels, rows = grid(found)
        own = "evcl-er" if kept else "evcl"
        for other in ("er", "derpp") if kept else ("generative-classifier", "lwf"):
            pairs = [(cells.get((b, own)), cells.get((b, other))) for b in found]
            ahead = ["-" if a is None or c is None else difference(a, c) for a, c in pairs]
            rows.append([f"{labels.get(own, own)} minus {labels.get(other, other)}", *ahead])
        parts.append(table(["method", *(title(benchmark) for benchmark in found)], rows))
    return "\n\n".join(parts)


def texts(folder: Path = TEXTS) -> str:
    """One table per stream of texts, with what the base model can still do (see experiments/text/measure.py)."""
    parts = []
    for benchmark, group in groups(folder, SCENARIOS).items():
        first = reference(group)
        rows = []
        for line in lines(group):
            result = line.result
            rows.append(
                [
                    line.label,
                    percent(result.average_accuracy),
                    "-" if first is None or line is first else difference(first, line),
                    percent(result.forgetting),
                    percent(result.ece),
                    percent(summarise(result.config["halves"])),
                ]
            )
        before = group.lines[0].result.config["halves_before"]
        columns = ["method", "accuracy", "EVCL minus", "forgetting", "ECE", f"halves ({100 * before:.1f} before)"]
        parts.append(f"`{benchmark}`:\n\n{table(columns, rows)}")
    return "\n\n".join(parts)


def filled(text: str, folder: Path = RESULTS) -> str:
    """A document with its tables written again."""
    for name, tables in (("field", made(folder)), ("scenarios", scenarios(folder)), ("texts", texts())):
        text = between(text, name, tables)
    return text


if __name__ == "__main__":
    for folder in (*(RESULTS / place(one) for one in (*BENCHMARKS, *SCENARIOS)), *TEXTS.glob("*")):
        for path in folder.glob(f"*/{RESULT}"):
            path.write_text(f"{in_lines(json.loads(path.read_text('utf-8')), 1)}\n", "utf-8")  # one line per key
    DOCUMENT.write_text(filled(DOCUMENT.read_text("utf-8")), "utf-8")
