"""Learners without labels: how likely new examples are, and what a generative model generates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.settings import Setting
from evcl.methods import TaskData
from evcl.targets.likelihood import NO_DENSITY

if TYPE_CHECKING:
    from evcl.learner.state import State

COUNT = Setting(1, "examples to generate", low=1, high=10_000_000)
DRAWS = Setting(1000, "latent draws", low=1, high=10_000_000)


def log_likelihood(state: State, data: Any, task: str | int | None, draws: int | None) -> Tensor:
    """[N]: see `Learner.log_likelihood`."""
    if task is None and state.session.tasks and not state.run.predicts_by_task:
        task = 0  # all tasks have the same network
    _task(state, task)
    return of_rows(state, *state.examples(data, "log_likelihood"), task, draws)


def of_rows(state: State, x: Tensor, y: Any, task: str | int | None, draws: int | None = None) -> Tensor:
    """`log_likelihood` of checked inputs, and of targets if there are any."""
    number = _task(state, task)
    head = state.session.groups[state.head(task)][0].number
    given = TaskData(x.unsqueeze(0), (y if isinstance(y, Tensor) else x).unsqueeze(0), head, None, number)
    count = None if draws is None else int(DRAWS.check("draws", draws))
    return state.run.log_likelihood(given, count)[0]


def sample(state: State, task: str | int | None, count: int, shape: tuple[int, ...] | None) -> Tensor:
    """[count, ...]: see `Learner.sample`."""
    number = _task(state, task)
    found = state.run.sample(number, int(COUNT.check("n", count)))[0]
    return found if shape is None else found.view(len(found), *shape)


def _task(state: State, task: str | int | None) -> int:
    if state.run.likelihood.heads:
        raise EvclError(NO_DENSITY)
    state.head(task)  # raises if there is no such task
    return state.number(task) or 0
