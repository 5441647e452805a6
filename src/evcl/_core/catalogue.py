"""What `evcl list` shows of methods and benchmarks, in the order of `catalogue.toml`; it needs no torch."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import NamedTuple

COSTS = Path(__file__).with_name("costs.json")  # written by perf/methods.py
EXAMPLE_NETWORK = "784-256-256"  # the network whose costs `evcl list methods` shows


class Facts(NamedTuple):
    """`keeps`: the numbers stored besides the plain weights, except single numbers of a task or head; and examples."""

    summary: str
    authors: str = "-"
    keeps: str = ""
    year: int = 0  # 0: no paper


_TABLE = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text("utf-8"))
METHOD_FACTS = {name: Facts(**about) for name, about in _TABLE["methods"].items()}
AGENT_FACTS = {name: Facts(**about) for name, about in _TABLE["agents"].items()}  # of methods that only agents have
METHOD_SUMMARIES = {name: one.summary for name, one in METHOD_FACTS.items()}
AGENT_SUMMARIES = {name: one.summary for name, one in AGENT_FACTS.items()}
ROW_SUMMARIES: dict[str, str] = _TABLE["rows"]  # of methods that only streams of rows have
BENCHMARK_SUMMARIES: dict[str, str] = _TABLE["benchmarks"]


def measured() -> tuple[dict[str, dict[str, dict[str, float]]], str]:
    """The costs, as network -> method -> `step`, in steps of naive, and `task`, in epochs of naive; and the machine."""
    record = json.loads(COSTS.read_text("utf-8"))
    return record["costs"], record["where"]
