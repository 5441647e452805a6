"""A benchmark is a sequence of tasks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import nn

from evcl._core.catalogue import BENCHMARK_SUMMARIES
from evcl._core.errors import EvclError
from evcl._core.randomness import Purpose, generator
from evcl._core.registry import Registry
from evcl._core.settings import SEED, VALIDATION, Setting
from evcl._core.tasks import Examples, Task, stratified
from evcl.targets import Energy

SCENARIOS = ("task", "domain", "class")
"""The scenarios of continual learning (van de Ven and Tolias, 2019): what a prediction is told, and must tell.

- `task`: the task is given, and predictions are among its classes. Each task has its own head.
- `domain`: the task is not given, and not asked for: all tasks have the same outputs, in one head. The first class of
  every task is output 0, the second is output 1, and so on.
- `class`: the task is not given, and predictions are among all classes so far, in one head that grows.
"""


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
        """The same tasks in the scenario `task`, `domain` or `class`: see `evcl.benchmarks.SCENARIOS`."""
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


def entry(
    name: str, build: Callable[[Request], Benchmark], tasks: int, classes: str = "", **more: bool | int | str
) -> Entry:
    """An entry of one of the library's benchmarks. `classes`: what a task shows, if that cannot be chosen."""

    def built(request: Request) -> Benchmark:
        if classes and request.classes is not None:
            raise EvclError(f"{name} {classes}: leave classes out")
        return build(request)

    about: dict[str, Any] = {"seeded": False, "tasks": tasks, "most_tasks": tasks, **more}
    return Entry(name, BENCHMARK_SUMMARIES[name], built, **about)


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
    with data files. `scenario` is `task`, `domain` or `class` (see `evcl.benchmarks.SCENARIOS`); None: the benchmark's
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


def in_scenario(tasks: Sequence[Task], scenario: str) -> list[Task]:
    """The same tasks in this scenario."""
    if scenario not in SCENARIOS:
        raise EvclError(f"scenario must be one of {', '.join(SCENARIOS)}, not {scenario!r}", setting="scenario")
    if scenario == "task":
        return [replace(task, head=task.name) for task in tasks]
    first, shared = tasks[0], all(task.classes == tasks[0].classes for task in tasks)
    if scenario == "class":
        if shared and len(tasks) > 1:
            raise EvclError("scenario class: every task has the same classes, so there are none to add: use domain")
        seen: list[int] = []
        made = []
        for task in tasks:
            seen += [label for label in task.classes if label not in seen]
            made.append(replace(task, head=first.name, classes=tuple(seen)))
        return made
    if shared:
        return [replace(task, head=first.name) for task in tasks]
    sizes = {len(task.classes) for task in tasks}
    if len(sizes) > 1:
        raise EvclError(
            f"scenario domain: every task needs the same number of classes, but they have {sorted(sizes)}",
            setting="scenario",
        )
    return [_numbered(task, first.name) for task in tasks]


def _numbered(task: Task, head: str) -> Task:
    """The task with the positions of its classes as labels."""
    order = torch.tensor(task.classes)

    def numbered(part: Examples | None) -> Examples | None:
        if part is None:
            return None
        return replace(part, labels=(part.labels.unsqueeze(1) == order).int().argmax(1))

    train, test = numbered(task.train), numbered(task.test)
    assert train is not None
    assert test is not None
    classes = tuple(range(len(order)))
    return replace(task, head=head, classes=classes, train=train, test=test, validation=numbered(task.validation))


def parted(whole: Examples, count: int, purpose: str) -> tuple[Examples, Examples]:
    """The examples without `count` of them, stratified, and these; the split is fixed."""
    kept, held = stratified(whole.labels, count, generator(0, purpose))
    return whole.select(kept), whole.select(held)


def split_tasks(
    train: Examples, test: Examples, groups: Sequence[tuple[int, ...]], words: Sequence[str] | None = None
) -> list[Task]:
    """One task, with its own head, for each group of classes; `words` are the classes' names."""
    tasks = []
    for group in groups:
        for part, which in ((train, "data"), (test, "test data")):
            known = part.labels.unique().tolist()
            if missing := sorted(set(group) - set(known)):
                raise EvclError(f"the {which} has the classes {known}, but not {missing}")
        name = "/".join(str(c) if words is None else words[c] for c in group)
        wanted = torch.tensor(group)
        parts = [part.select(torch.isin(part.labels, wanted).nonzero().flatten()) for part in (train, test)]
        tasks.append(Task(name, name, group, parts[0], parts[1]))
    return tasks


def permuted_tasks(train: Examples, test: Examples, tasks: int, seed: int) -> list[Task]:
    """The same data with its pixels in a different random order for each task; all tasks share one head."""
    classes = tuple(train.labels.unique().tolist())
    made = []
    for k in range(tasks):
        order = torch.randperm(train.inputs.shape[1], generator=generator(seed, Purpose.PERMUTATION, k))
        parts = (replace(part, permutation=order) for part in (train, test))
        made.append(Task(f"permutation {k}", "permutation 0", classes, *parts))
    return made
