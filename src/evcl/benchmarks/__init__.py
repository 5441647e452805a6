"""Benchmarks: sequences of tasks, made from arrays."""

from evcl._core.randomness import generator
from evcl._core.tasks import Examples, Task, stratified
from evcl.benchmarks.benchmark import (
    BENCHMARKS,
    Benchmark,
    Entry,
    Request,
    check_tasks,
    get,
    register,
)
from evcl.benchmarks.elsewhere import ENTRIES as ELSEWHERE
from evcl.benchmarks.own import from_arrays, from_datasets, from_stream, permute, split
from evcl.benchmarks.registered import ENTRIES
from evcl.benchmarks.scenario import SCENARIOS

for _entry in (*ENTRIES, *ELSEWHERE):
    register(_entry)

__all__ = [
    "BENCHMARKS",
    "SCENARIOS",
    "Benchmark",
    "Entry",
    "Examples",
    "Request",
    "Task",
    "check_tasks",
    "from_arrays",
    "from_datasets",
    "from_stream",
    "generator",
    "get",
    "permute",
    "register",
    "split",
    "stratified",
]
