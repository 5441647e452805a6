"""Write the tables of the streams of months into docs/RESULTS.md, from the files in `results/`.

    python experiments/months/write_table.py

They stand between `<!-- months -->` and `<!-- end months -->`. The tests check that they are as this writes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
DOCUMENT = HERE.parents[1] / "docs" / "RESULTS.md"
BEGIN, END = "<!-- months -->\n", "<!-- end months -->"
STREAMS = ("shop", "shop-additive", "regions", "digits", "census")
NAMES = {
    "evcl": "**EVCL** (`evcl learn`)", "evcl --keep 200": "EVCL, `--keep 200`", "naive": "naive", "vcl": "VCL",
    "ewc": "EWC", "SGDClassifier": "SGDClassifier", "GaussianNB": "GaussianNB", "MLPClassifier": "MLPClassifier",
    "Hoeffding tree": "Hoeffding tree (River)", "adaptive random forest": "adaptive random forest (River)",
    "boosting, last month": "gradient boosting, last month only",
    "boosting, everything": "gradient boosting, all months at once",
}  # fmt: skip
KEEPS = ("evcl --keep 200", "boosting, everything")  # these have rows of earlier months
Matrix = list[list[float]]


def every(found: Matrix) -> float:
    return float(np.mean(found[-1]))


def last(found: Matrix) -> float:
    return found[-1][-1]


def ahead(found: Matrix) -> float:
    """Each month before it is learned."""
    return float(np.mean([found[i][i + 1] for i in range(len(found) - 1)]))


MEASURES: dict[str, tuple[Callable[[Matrix], float], tuple[str, ...]]] = {
    "New rows of all months, after the last one": (every, STREAMS),
    "New rows of the last month": (last, STREAMS),
    "New rows of each month, before it is learned": (ahead, tuple(name for name in STREAMS if name != "digits")),
}


def made(folder: Path = HERE / "results") -> str:
    """A table per measure: a row per learner, a column per stream; the best of those without old rows in bold. A cell
    with fewer than two seeds is left empty.
    """
    saved = {name: json.loads((folder / f"{name}.json").read_text("utf-8"))["learners"] for name in STREAMS}
    parts = []
    for title, (measure, streams) in MEASURES.items():
        cells: dict[str, dict[str, tuple[float, float]]] = {}
        for stream in streams:
            for learner, runs in saved[stream].items():
                values = 100 * np.array([measure(run["accuracy"]) for run in runs.values()])
                if len(values) > 1:
                    cells.setdefault(learner, {})[stream] = float(values.mean()), float(values.std(ddof=1))
        best = {s: max(row[s][0] for n, row in cells.items() if n not in KEEPS and s in row) for s in streams}
        lines = [["", *(f"`{s}`" for s in streams)], ["---", *["---:"] * len(streams)]]
        for learner, label in NAMES.items():
            row = [label]
            for s in streams:
                if s not in cells.get(learner, {}):
                    row.append("")
                    continue
                mean, deviation = cells[learner][s]
                text = f"{mean:.1f} ± {deviation:.1f}"
                row.append(f"**{text}**" if learner not in KEEPS and mean == best[s] else text)
            lines.append(row)
        parts.append(f"{title}:\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in lines))
    return "\n\n".join(parts)


def filled(text: str) -> str:
    """A document with its tables written again."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{made()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    DOCUMENT.write_text(filled(DOCUMENT.read_text("utf-8")), "utf-8")
