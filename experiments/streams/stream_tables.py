"""Write the tables of the streams into docs/RESULTS.md, from the files in results/; or print all measures of a part.

python experiments/streams/stream_tables.py             # into docs/RESULTS.md
python experiments/streams/stream_tables.py first       # print one of: streams whole first alarms
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from run_alarms import AT, PARAMETERS, ROWS, WITHIN
from run_streams import HERE, NAMES, jobs
from stream_learners import PEERS

from evcl.experiments.compare import between
from evcl.streams.sources import table

MEASURES = {  # measure: title, factor, places, whether less is better
    "accuracy": ("Accuracy (%)", 100.0, 1, False),
    "nll": ("Log-loss (nats)", 1.0, 3, True),
    "nll_smoothed": ("Log-loss of 0.99 p + 0.01 / classes (nats)", 1.0, 3, True),
    "ece": ("Expected calibration error (%)", 100.0, 1, True),
    "kappa": ("Cohen's kappa", 1.0, 3, False),
}
DOCUMENT = HERE.parents[1] / "docs" / "RESULTS.md"
ALLOWED = 1 / ROWS  # false alarms per row


def lines(rows: Iterable[Iterable[object]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def streams() -> str:
    """The reported streams."""
    head = ["stream", "rows", "inputs", "classes", "drift"]
    cells = [[f"`{r['name']}`", f"{r['rows']:,}", r["inputs"], r["classes"], r["drift"]] for r in table()]
    return lines([head, ["---", *["---:"] * 3, "---"], *cells])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def compared(part: str, measures: Iterable[str] = MEASURES, folder: Path = HERE / "results") -> str:
    """A table for each of these measures: a row per stream, a column per learner, the best in bold; then how often each
    is first, and how often its accuracy is within one point of the best. A stream is left out if a learner has not
    finished it.
    """
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for one in read(folder / f"{part}.jsonl"):
        found.setdefault(one["stream"], {}).setdefault(one["learner"], []).append(one)
    whole = [
        name
        for name in NAMES
        if name in found and all(len(found[name].get(who, ())) == len(jobs(part, [name], [who], None)) for who in PEERS)
    ]
    parts = []
    for measure in measures:
        title, factor, places, less = MEASURES[measure]
        first = dict.fromkeys(PEERS, 0)
        near = dict.fromkeys(PEERS, 0)
        rows: list[list[str]] = [["stream", *PEERS], ["---", *["---:"] * len(PEERS)]]
        for name in whole:
            values = {who: factor * np.array([one[measure] for one in found[name][who]]) for who in PEERS}
            means = {who: float(some.mean()) for who, some in values.items()}
            best = min(means.values()) if less else max(means.values())
            row = [f"`{name}`"]
            for who, some in values.items():
                spread = f" ± {some.std(ddof=1):.{places}f}" if len(some) > 1 else ""
                text = f"{means[who]:.{places}f}{spread}"
                row.append(f"**{text}**" if means[who] == best else text)
                first[who] += means[who] == best
                near[who] += abs(means[who] - best) <= 1
            rows.append(row)
        rows.append([f"first of {len(whole)}", *map(str, first.values())])
        if measure == "accuracy":
            rows.append(["within 1 point of the best", *map(str, near.values())])
        parts.append(f"{title}:\n\n{lines(rows)}")
    return "\n\n".join(parts)


def alarms(folder: Path = HERE / "results") -> str:
    """For each detector at its calibrated parameter: false alarms, changes found, and the delay until they were."""
    found: dict[str, list[dict[str, Any]]] = {}
    for one in read(folder / "alarms.jsonl"):
        found.setdefault(one["part"], []).append(one)
    if set(found) != {"calibration", "check", "changes"}:
        return "run_alarms.py has not finished"
    rows: list[list[str]] = [
        ["detector", "parameter", "false alarms per 10,000 rows", "found", "delay, mean", "delay, median"],
        ["---", *["---:"] * 5],
    ]
    for who in found["check"][0]["alarms"]:
        counts = [sum(len(one["alarms"][who][k]) for one in found["calibration"]) for k in range(len(_of(who)))]
        allowed = ALLOWED * ROWS * len(found["calibration"])
        fits = [k for k, count in enumerate(counts) if count <= allowed]
        k = max(fits, key=lambda k: counts[k]) if fits else int(np.argmin(counts))
        rate = sum(len(one["alarms"][who][k]) for one in found["check"]) / len(found["check"]) * 10_000 / ROWS
        delays = []
        for one in found["changes"]:
            begin = AT - one["width"] // 2
            later = [row - begin for row in one["alarms"][who][k] if 0 <= row - begin < WITHIN]
            delays += later[:1]
        told = [f"{np.mean(delays):.0f}", f"{np.median(delays):.0f}"] if delays else ["", ""]
        rows.append([who, f"{_of(who)[k]:g}", f"{rate:.2f}", f"{len(delays)} of {len(found['changes'])}", *told])
    return lines(rows)


def _of(who: str) -> tuple[float, ...]:
    return PARAMETERS[who.split(" ", maxsplit=1)[0]]


def filled(text: str) -> str:
    """A document with its tables written again."""
    shown = ("accuracy", "nll", "ece")
    parts = {
        "The streams": streams(),
        "The first 20,000 rows": compared("first", shown),
        "Whole streams": compared("whole", shown),
        "Alarms": alarms(),
    }
    return between(text, "streams", "\n\n".join(f"### {title}\n\n{made}" for title, made in parts.items()))


TABLES: dict[str, Callable[[], str]] = {
    "streams": streams,
    "whole": lambda: compared("whole"),
    "first": lambda: compared("first"),
    "alarms": alarms,
}


def main() -> None:
    for name in sys.argv[1:]:
        print(f"## {name}\n\n{TABLES[name]()}\n")
    if not sys.argv[1:]:
        DOCUMENT.write_text(filled(DOCUMENT.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
