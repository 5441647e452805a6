"""What is not measured here: the curves of the paper's five figures, and what the report says in whole sentences."""

from __future__ import annotations

import csv
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

Curve = tuple[float, ...]
WORDS: dict[str, Any] = tomllib.loads(files("evcl.report").joinpath("words.toml").read_text("utf-8"))


@cache
def published() -> dict[tuple[str, str], Curve]:
    """Maps (benchmark, method) to the published average accuracy after each task."""
    lines = files("evcl.report").joinpath("published.csv").read_text("utf-8").splitlines()
    curves: dict[tuple[str, str], dict[int, float]] = {}
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        curve = curves.setdefault((row["benchmark"], row["method"]), {})
        curve[int(row["tasks_trained"])] = float(row["average_accuracy"])
    return {key: tuple(curve[t] for t in sorted(curve)) for key, curve in curves.items()}
