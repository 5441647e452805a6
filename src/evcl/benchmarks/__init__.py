"""Arrays in, a sequence of tasks out."""

from evcl.benchmarks.benchmark import (
    BENCHMARKS,
    Benchmark,
    Entry,
    Examples,
    Task,
    check_tasks,
    get,
    register,
    stratified,
)
from evcl.benchmarks.digits import PERMUTED, SPLIT

for _entry in (PERMUTED, SPLIT):  # the order of `evcl list`
    register(_entry)

__all__ = ["BENCHMARKS", "Benchmark", "Entry", "Examples", "Task", "check_tasks", "get", "register", "stratified"]
