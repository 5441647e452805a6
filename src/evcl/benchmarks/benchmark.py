"""A benchmark is a sequence of tasks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

from torch import nn

from evcl._core.errors import EvclError
from evcl._core.randomness import Purpose, generator
from evcl._core.registry import Registry
from evcl._core.settings import SEED, VALIDATION, Setting
from evcl._core.tasks import Examples, Task, stratified
from evcl.benchmarks.scenario import in_scenario
from evcl.targets import Energy


class Benchmark(Sequence[Task]):
    """A sequence of tasks: supports `len`, indexing, slicing and iteration."""

    def __init__(
        self,
        name: str,
        tasks: Sequence[Task],
        *,
        hidden: Sequence[int] | None = None,
        network: Callable[[], nn.Module] | None = None,
        seed: int = 0,
        energy: Energy | None = None,
    ) -> None:
        """`hidden`: widths of the MLP trunk's hidden layers in the published protocol. For any other trunk, `network`
        is a function that makes it. `energy`: what its network minimises if the tasks have no labels to predict; it
        explains the inputs.
        """
        self.name, self.seed, self.energy = name, seed, energy
        if (hidden is None) == (network is None):
            raise EvclError(f"benchmark {name!r} needs either hidden= (widths of an MLP) or network= (makes one)")
        self.hidden, self.network = tuple(hidden or ()), network
        self._tasks = tuple(tasks)

    @property
    def inputs(self) -> int:
        """The number of input values per example."""
        return self._tasks[0].train.inputs[0].numel()

    def __len__(self) -> int:
        return len(self._tasks)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Benchmark: ...
    def __getitem__(self, index: int | slice) -> Task | Benchmark:
        if isinstance(index, slice):
            return self._of(self._tasks[index])
        return self._tasks[index]

    def hold_out(self, part: float) -> Benchmark:
        """The same tasks, each with a stratified part of its training set moved to `validation`. The split is fixed.

        Tasks that share their inputs (permuted ones) still share them afterwards.
        """
        part = float(VALIDATION.check("validation", part))
        cut: dict[tuple[int, int], tuple[Examples, Examples]] = {}
        tasks = []
        for k, task in enumerate(self._tasks if part else ()):
            train, key = task.train, (id(task.train.inputs), id(task.train.labels))
            if key not in cut:
                count = max(1, round(part * len(train)))
                kept, held = stratified(train.labels, count, generator(0, Purpose.VALIDATION, k))
                cut[key] = train.select(kept), train.select(held)
            rest, validation = (replace(half, permutation=train.permutation) for half in cut[key])
            tasks.append(replace(task, train=rest, validation=validation))
        return self._of(tasks) if part else self

    def in_scenario(self, scenario: str) -> Benchmark:
        """The same tasks in the scenario `task`, `domain` or `class`: see `evcl.benchmarks.scenario`."""
        return self._of(in_scenario(self._tasks, scenario))

    def _of(self, tasks: Sequence[Task]) -> Benchmark:
        hidden = self.hidden if self.network is None else None
        return Benchmark(self.name, tasks, hidden=hidden, network=self.network, seed=self.seed, energy=self.energy)

    def __repr__(self) -> str:
        return f"Benchmark({self.name!r}, {len(self)} tasks, seed={self.seed})"


@dataclass(frozen=True)
class Request:
    """The arguments with which a benchmark is built."""

    seed: int
    tasks: int
    classes: tuple[tuple[int, ...], ...] | None  # None: the benchmark's default groups
    data_dir: Path | None


@dataclass(frozen=True)
class Entry:
    """A registered benchmark: `build(request)` makes it, with at least `request.tasks` tasks.

    `kind` says what it is a stream of if not of labelled tasks: such a benchmark has methods of its own, and `evcl run`
    alone can run it. `method` is the one that it uses if none is named.
    """

    name: str
    summary: str
    build: Callable[[Request], Benchmark]
    seeded: bool  # whether the tasks depend on the seed (permutations); if not, all seeds see the same tasks
    tasks: int = 5  # the default number
    most_tasks: int = 2_000  # each is measured after every later one: 2,000,000 times; the result has 4,000,000 numbers
    kind: Literal["rows", "agents"] | None = None
    method: str = "evcl"
    cpu: bool = False  # whether it is learned on the CPU even if there is a GPU
    score: str = "average_accuracy"  # what it is judged by: a field of `evcl.experiments.Result`


BENCHMARKS: Registry[Entry] = Registry("benchmark")
"""All benchmarks, by name."""


def register(entry: Entry, *, overwrite: bool = False) -> Entry:
    """Register your own benchmark, so that `evcl run` knows it."""
    if not isinstance(entry, Entry):
        raise EvclError(f"register takes an evcl.benchmarks.Entry, not {type(entry).__name__}")
    BENCHMARKS.add(entry.name, entry, overwrite=overwrite)
    return entry


def get(
    name: str,
    seed: int = 0,
    tasks: int | None = None,
    validation: float = 0.0,
    classes: Sequence[Sequence[int]] | None = None,
    data_dir: str | Path | None = None,
    scenario: str | None = None,
) -> Benchmark:
    """Build the benchmark with this name, fetching its data if needed.

    `tasks` is the number of tasks. `validation` is the fraction to hold out of every training set, stratified.
    `classes` gives a split benchmark other groups, or another order: [[4, 9], [0, 1, 2]]. `data_dir` is a local folder
    with data files. `scenario` is `task`, `domain` or `class` (see `evcl.benchmarks.scenario`); None: the benchmark's
    own, which is `task` for a split benchmark and `domain` for a permuted one.
    """
    entry = BENCHMARKS[name]
    groups = None if classes is None else check_groups(classes)
    if groups is not None:
        entry = replace(entry, tasks=len(groups), most_tasks=len(groups))
    request = Request(
        seed=int(SEED.check("seed", seed)),
        tasks=check_tasks(entry, tasks),
        classes=groups,
        data_dir=None if data_dir is None else Path(data_dir),
    )
    VALIDATION.check("validation", validation)  # fail before fetching anything
    made = entry.build(request)
    if len(made) < request.tasks:
        raise EvclError(f"{name} has {len(made)} tasks, not {request.tasks}: set tasks and most_tasks in its Entry")
    made = made[: request.tasks].hold_out(validation)
    return made if scenario is None else made.in_scenario(scenario)


def check_tasks(entry: Entry, tasks: int | None) -> int:
    """The number of tasks, or the default if None. Raises if the benchmark does not have that many."""
    limits = Setting(entry.tasks, "tasks", low=1, high=entry.most_tasks)
    return int(limits.check(f"tasks of {entry.name}", entry.tasks if tasks is None else tasks))


def check_groups(classes: Any) -> tuple[tuple[int, ...], ...]:
    """Groups of classes, one per task. Raises unless each has at least two distinct integers and no group repeats."""
    try:
        groups = tuple(tuple(operator.index(label) for label in group) for group in classes)
    except TypeError:
        raise EvclError(f"classes must be groups of whole numbers like [[0, 1], [2, 3]], not {classes!r}") from None
    if not groups:
        raise EvclError("classes must be groups like [[0, 1], [2, 3]], but there are none")
    for group in groups:
        if len(group) < 2 or len(set(group)) != len(group):
            raise EvclError(f"a group must have at least two different classes, not {list(group)}")
    if len(set(groups)) != len(groups):
        raise EvclError("the groups of classes must differ: each names a task")
    return groups
