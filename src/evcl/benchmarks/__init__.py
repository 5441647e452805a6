"""Benchmarks: sequences of tasks, made from arrays.

In: arrays, of `evcl.data` or the user's. Out: a `Benchmark` of `Task`s, by name or from the user's arrays.
To change: entries can be added (`register`). Fixed: the rows of a registered benchmark and their order, which are
part of its results: another stream is another name.
"""

from typing import TYPE_CHECKING

from evcl._core.catalogue import BENCHMARK_SUMMARIES
from evcl._core.lazy import lazily
from evcl._core.randomness import generator
from evcl._core.tasks import Examples, Task, stratified
from evcl.benchmarks.benchmark import BENCHMARKS, SCENARIOS, Benchmark, Entry, Request, check_tasks, get, register

if TYPE_CHECKING:
    from evcl.benchmarks.own import from_arrays, from_datasets, from_stream, permute, split
else:
    __getattr__, __dir__ = lazily(
        __name__, {"evcl.benchmarks.own": "from_arrays from_datasets from_stream permute split"}
    )

# Where each benchmark is, imported when it is first used; in the order in which `evcl list` shows them.
_HOMES = {
    "texts": "bbc-topics mails",
    "language": "characters-mnist characters-notmnist characters-digits sotu-decades",
    "elsewhere": "cartpole-variants minigrid-rooms weather census flights-monthly mails-by-date phishing bananas "
    "segments shuttle stagger sea agrawal hyperplane led rbf",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
for _name in BENCHMARK_SUMMARIES:
    BENCHMARKS.add_later(_name, f"evcl.benchmarks.{_HOME_OF.get(_name, 'registered')}:ENTRIES")

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
