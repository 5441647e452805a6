"""Continuum: its scenarios as evcl benchmarks.

A task set of Continuum has items (x, y, task), which `Learner.learn` also reads as they are:

    for task_set in scenario:
        learner.learn(task_set)
"""

from __future__ import annotations

from collections.abc import Sequence

from evcl._core.errors import EvclError, extra
from evcl.benchmarks import Benchmark, from_stream
from evcl.benchmarks.own import HIDDEN

with extra("continuum", "evcl.integrations.continuum needs continuum"):
    from continuum.scenarios import _BaseScenario
    from continuum.tasks import TaskType

__all__ = ["from_continuum"]

READ = (TaskType.IMAGE_ARRAY, TaskType.IMAGE_PATH, TaskType.TENSOR, TaskType.H5)


def from_continuum(
    train: _BaseScenario,
    test: _BaseScenario,
    *,
    scenario: str | None = None,
    names: Sequence[str] | None = None,
    hidden: Sequence[int] = HIDDEN,
) -> Benchmark:
    """A Continuum scenario of training data and one of test data, with the same tasks, as an evcl benchmark, read into
    memory.

    Its transformations are applied once: random augmentation belongs to training, not here. `scenario` is `task`,
    `domain` or `class`. None: `domain` if all tasks have the same classes, as in `InstanceIncremental`, otherwise
    `class`, as in `ClassIncremental`.
    """
    for name, one in (("train", train), ("test", test)):
        if not isinstance(one, _BaseScenario):
            raise EvclError(f"{name} must be a Continuum scenario, such as ClassIncremental, not {type(one).__name__}")
        kind = one.cl_dataset.data_type
        if kind not in READ:
            raise EvclError(f"{name} has data of the type {kind.name}, but only numbers and images can be read")
    return from_stream(train, test, scenario=scenario, names=names, hidden=hidden)
