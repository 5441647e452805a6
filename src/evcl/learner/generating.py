"""Learners without labels: what `learn` reads, how likely new examples are, and what a generative model generates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.settings import Setting
from evcl._core.tasks import Examples, Task
from evcl.methods import TaskData
from evcl.targets import Bound, Energy
from evcl.training import energies

if TYPE_CHECKING:
    from evcl.learner.predictor import Predictor

COUNT = Setting(1, "examples to generate", low=1, high=10_000_000)
DRAWS = Setting(1000, "latent draws", low=1, high=10_000_000)


def examples(predictor: Predictor, data: Any, verb: str) -> tuple[Tensor, Tensor | None]:
    """The inputs [N, ...] of data without labels, and their targets if there are any: x, (x, y), or a task."""
    if isinstance(data, (Task, Examples)):
        data = data.train.x if isinstance(data, Task) else data.x
    x, y = data if isinstance(data, tuple) and len(data) == 2 else (data, None)
    found = predictor._inputs(x)
    bound, (low, high) = predictor._run.likelihood, (float(found.min()), float(found.max()))
    if isinstance(bound, Bound) and not bound.gaussian and not 0 <= low <= high <= 1:
        raise EvclError(f"{verb}: a bound takes inputs within 0 to 1, not {low:g} to {high:g}: scale them first")
    if y is None:
        return found, None
    if isinstance(bound, Bound):
        raise EvclError(f"a bound explains its inputs: call {verb}(x)")
    targets = torch.as_tensor(y)
    if not len(targets.shape) or len(targets) != len(found):
        raise EvclError(f"{verb} takes a target for each of {len(found)} inputs, not {tuple(targets.shape)}")
    return found, targets.to(found) if targets.is_floating_point() else targets.to(found.device)


def log_likelihood(predictor: Predictor, data: Any, task: str | int | None, draws: int | None) -> Tensor:
    """[N]: see `Predictor.log_likelihood`."""
    if task is None and predictor._tasks and not predictor._run.predicts_by_task:
        task = 0  # all tasks have the same network
    number = _task(predictor, task)
    x, y = examples(predictor, data, "log_likelihood")
    head = predictor._session.groups[predictor._head(task)][0].number
    told = None if y is None else y.unsqueeze(0)
    given = TaskData(x.unsqueeze(0), x.unsqueeze(0) if told is None else told, head, None, number)
    count = None if draws is None else int(DRAWS.check("draws", draws))
    return energies.log_likelihood(predictor._run, given, count)[0]


def sample(predictor: Predictor, task: str | int | None, count: int, shape: tuple[int, ...] | None) -> Tensor:
    """[count, ...]: see `Predictor.sample`."""
    number = _task(predictor, task)
    found = energies.sample(predictor._run, number, int(COUNT.check("n", count)))[0]
    return found if shape is None else found.view(len(found), *shape)


def _task(predictor: Predictor, task: str | int | None) -> int:
    predictor._check_idle()
    if not isinstance(predictor._run.likelihood, Energy):
        raise EvclError(
            "this learner predicts labels: a generative model needs an evcl.nn.VAE and likelihood='bound', and "
            "log_likelihood any energy"
        )
    predictor._head(task)  # raises if there is no such task
    return predictor._number(task) or 0
