"""Benchmarks from your own data: from ready-made tasks, or from one data set that is split or permuted into tasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, TypeVar, runtime_checkable

import torch
from numpy.typing import ArrayLike

from evcl._core import inputs
from evcl._core.errors import EvclError
from evcl._core.randomness import Purpose
from evcl._core.settings import SEED
from evcl._core.tasks import Examples, Task
from evcl.benchmarks.benchmark import Benchmark, check_groups, parted, permuted_tasks, split_tasks

T = TypeVar("T")
HIDDEN = (100, 100)  # default hidden layers of the trunk in `evcl run`

Heads = Literal["separate", "shared"]
Pair = tuple[ArrayLike, ArrayLike]  # inputs and labels
Held = float | Pair  # a fraction to hold out, or examples of their own


@runtime_checkable
class DataSet(Protocol):
    """A torch data set: its items are (x, y), or (x, y, task)."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Sequence[ArrayLike]: ...


def from_arrays(
    tasks: Sequence[tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike]],
    *,
    names: Sequence[str] | None = None,
    heads: Heads = "separate",
    hidden: Sequence[int] = HIDDEN,
) -> Benchmark:
    """One task for each (x_train, y_train, x_test, y_test). With `heads="shared"`, all tasks share one head.

    Inputs are numbers [N, ...], labels integers [N]. Inputs are used unchanged: scale pixels first.
    """
    if heads not in ("separate", "shared"):
        raise EvclError(f"heads must be 'separate' or 'shared', not {heads!r}")
    listed = _listed(tasks, "(x_train, y_train, x_test, y_test)", 4)
    names = [str(k) for k in range(len(listed))] if names is None else [str(name) for name in names]
    if len(set(names)) != len(listed):
        raise EvclError(f"{len(listed)} tasks need {len(listed)} different names, not {names}")
    read = []
    for name, (x, y, x_test, y_test) in zip(names, listed, strict=True):
        read.append((_examples(x, y, f"task {name!r}, train"), _examples(x_test, y_test, f"task {name!r}, test")))
    everything = sorted({label for train, _ in read for label in train.labels.unique().tolist()})
    made = []
    for name, (train, test) in zip(names, read, strict=True):
        classes = everything if heads == "shared" else train.labels.unique().tolist()
        if missing := sorted(set(test.labels.tolist()) - set(classes)):
            raise EvclError(f"task {name!r}: the test labels {missing} are not in its training set")
        if train.inputs.shape[1:] != read[0][0].inputs.shape[1:] or test.inputs.shape[1:] != train.inputs.shape[1:]:
            raise EvclError(f"task {name!r}: the shape of its inputs differs from that of task {names[0]!r}")
        made.append(Task(name, names[0] if heads == "shared" else name, tuple(classes), train, test))
    return Benchmark("own", made, hidden=hidden)


def from_datasets(
    tasks: Sequence[tuple[DataSet, DataSet]],
    *,
    names: Sequence[str] | None = None,
    heads: Heads = "separate",
    hidden: Sequence[int] = HIDDEN,
) -> Benchmark:
    """One task for each (training, test) pair of torch data sets with items (x, y), or (x, y, task), whose third part
    is not used; options as in `from_arrays`.
    """
    pairs = _listed(tasks, "(training, test)", 2)
    arrays = [(*_stacked(train)[:2], *_stacked(test)[:2]) for train, test in pairs]
    return from_arrays(arrays, names=names, heads=heads, hidden=hidden)


def from_stream(
    train: DataSet | Sequence[DataSet],
    test: DataSet | Sequence[DataSet],
    *,
    scenario: str | None = None,
    names: Sequence[str] | None = None,
    hidden: Sequence[int] = HIDDEN,
) -> Benchmark:
    """The tasks of a continual learning stream. `train` and `test` each have one data set per task; or they are data
    sets whose items are (x, y, task), the examples of all tasks. If `test` has one task and `train` several, every task
    is tested on it.

    `scenario` is `task`, `domain` or `class`, as in `get`. None: `domain` if all tasks have the same classes, otherwise
    `class`.
    """
    parts = _by_task(train, "the training stream"), _by_task(test, "the test stream")
    numbers = list(parts[0])
    if len(parts[1]) == 1 and len(numbers) > 1:
        tests = list(parts[1].values()) * len(numbers)
    elif len(parts[1]) != len(numbers):
        raise EvclError(f"the training stream has {len(numbers)} tasks, but the test stream has {len(parts[1])}")
    elif set(parts[1]) != set(numbers):
        raise EvclError(f"the training stream has the tasks {numbers}, but the test stream has {list(parts[1])}")
    else:
        tests = [parts[1][number] for number in numbers]
    names = [f"task {number}" for number in numbers] if names is None else names
    every = [(*pair, *held) for pair, held in zip(parts[0].values(), tests, strict=True)]
    labels = {label for _, y, *_ in every for label in y.unique().tolist()}
    same = all({*y.unique().tolist()} == labels for _, y, *_ in every)
    benchmark = from_arrays(every, names=names, heads="shared" if same else "separate", hidden=hidden)
    return benchmark.in_scenario(scenario or ("domain" if same else "class"))


def _by_task(stream: DataSet | Sequence[DataSet], what: str) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and labels of each task of a stream, in the order of the tasks' numbers."""
    try:
        first = stream[0]
    except (TypeError, KeyError, IndexError, ValueError, AttributeError):
        first = None
    if isinstance(first, (tuple, list)) and len(first) == 3:
        x, y, task = _stacked(stream)
        if task is None or task.dim() != 1:
            raise EvclError(f"{what}: the third part of an item (x, y, task) must be a whole number, the task's")
        return {k: (x[task == k], y[task == k]) for k in task.unique().tolist()}
    if not isinstance(stream, Iterable) and not hasattr(stream, "__getitem__"):
        raise EvclError(f"{what} must have one data set per task, or be a data set with items (x, y, task)")
    tasks = {k: _stacked(data)[:2] for k, data in enumerate(iter(stream))}
    if not tasks:
        raise EvclError(f"{what} has no tasks")
    return tasks


def split(
    x: ArrayLike,
    y: ArrayLike,
    classes: Sequence[Sequence[int]],
    *,
    test: Held = 0.2,
    hidden: Sequence[int] = HIDDEN,
) -> Benchmark:
    """One task for each group of classes. `test` is a fraction to hold out, stratified, or a pair (x, y)."""
    return Benchmark("own", split_tasks(*_parts(x, y, test), check_groups(classes)), hidden=hidden)


def permute(
    x: ArrayLike,
    y: ArrayLike,
    tasks: int = 10,
    *,
    test: Held = 0.2,
    seed: int = 0,
    hidden: Sequence[int] = HIDDEN,
) -> Benchmark:
    """The same data in every task, with the input values in a different random order; all tasks share one head."""
    if isinstance(tasks, bool) or not isinstance(tasks, int) or tasks < 1:
        raise EvclError(f"tasks must be a whole number of at least 1, not {tasks!r}")
    seed = int(SEED.check("seed", seed))
    train, held = _parts(x, y, test)
    if missing := sorted(set(held.labels.tolist()) - set(train.labels.tolist())):
        raise EvclError(f"the test labels {missing} are not in the training set")
    flat = [Examples(part.inputs.flatten(1), part.labels) for part in (train, held)]
    return Benchmark("own", permuted_tasks(flat[0], flat[1], tasks, seed), hidden=hidden, seed=seed)


def _parts(x: ArrayLike, y: ArrayLike, test: Held) -> tuple[Examples, Examples]:
    whole = _examples(x, y, "the data")
    if isinstance(test, (tuple, list)) and len(test) == 2:
        given = _examples(*test, "the test data")
        if given.inputs.shape[1:] != whole.inputs.shape[1:]:
            raise EvclError("the test data: the shape of its inputs differs from the training data's")
        return whole, given
    if not isinstance(test, (int, float)) or not 0 < test < 1:
        came = f"{len(test)} things" if isinstance(test, (tuple, list)) else repr(test)
        raise EvclError(f"test must be a fraction between 0 and 1, or a pair (x, y), not {came}")
    return parted(whole, max(1, round(test * len(whole))), Purpose.TEST)


def _examples(x: ArrayLike, y: ArrayLike, what: str) -> Examples:
    try:
        tensor = inputs.inputs(x, torch.float32, "cpu")
        labels = inputs.labels(y, len(tensor))
        if isinstance(labels[0], str):
            raise EvclError("a benchmark's labels must be integers, but these are text: number them first")
    except EvclError as error:
        raise EvclError(f"{what}: {error}") from None
    return Examples(tensor, torch.tensor(labels))


def _listed(tasks: Sequence[T], what: str, size: int) -> list[T]:
    """A list of tuples of this size, one per task."""
    items = list(tasks) if isinstance(tasks, Iterable) else []
    if not items:
        raise EvclError(f"there are no tasks: give a list with {what} for each")
    for k, task in enumerate(items):
        if not isinstance(task, (tuple, list)) or len(task) != size:
            raise EvclError(f"the tasks must be a list with {what} for each, but task {k} is something else")
    return items


def _stacked(dataset: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Inputs, labels and, if all items are (x, y, task), the numbers of the tasks."""
    if not isinstance(dataset, DataSet):
        raise EvclError(f"a data set needs len() and indexing, but {type(dataset).__name__} does not have both")
    items = [dataset[i] for i in range(len(dataset))]
    if not items:
        raise EvclError("a data set is empty")
    if any(not isinstance(item, (tuple, list)) or len(item) not in (2, 3) for item in items):
        raise EvclError("a data set's items must be (x, y), or (x, y, task)")
    try:
        x, y = (torch.stack([torch.as_tensor(item[part]) for item in items]) for part in (0, 1))
        task = torch.stack([torch.as_tensor(item[2]) for item in items]) if len(items[0]) == 3 else None
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise EvclError(f"a data set's items must be (x, y), with all x of one shape: {error}") from None
    return x, y, task
