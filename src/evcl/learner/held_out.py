"""The validation part of a task: read and check the options of `learn`, and split the task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.inputs import Label, positions
from evcl._core.settings import VALIDATION, Setting
from evcl._core.tasks import stratified
from evcl.training import TaskData

PATIENCE = Setting(10, "epochs without a smaller NLL on the validation part", low=1, high=1_000_000)
HeldOut = float | tuple[Tensor, Any]  # the fraction to hold out, or validation examples of their own


def requested(validation: Any, patience: Any, read: Callable[[Any], tuple[Tensor, Any]]) -> HeldOut:
    """The validation part that these options of `learn` request; `read` reads examples. Raises if one is invalid."""
    if patience is not None:
        PATIENCE.check("patience", patience)
        if validation is None:
            raise EvclError("patience needs a validation part: validation=0.1, or a pair (x, y)")
    if validation is None:
        return 0.0
    if isinstance(validation, (int, float, str)):
        return float(replace(VALIDATION, default=0.1, open_low=True).check("validation", validation))
    try:
        return read(validation)
    except EvclError as error:
        raise EvclError(f"validation: {error}") from None


def among(held: tuple[Tensor, Any], classes: Sequence[Label], head: Sequence[Label]) -> HeldOut:
    """The validation examples of these classes, out of all that their head has. Other labels stay, to be refused."""
    others = set(head) - set(classes)
    rows = [i for i, label in enumerate(held[1]) if label not in others]
    if not rows:
        raise EvclError("validation: it has no examples of the classes that most of the task's examples have")
    return held if len(rows) == len(held[1]) else (held[0][rows], [held[1][i] for i in rows])


def hold_out(
    task: TaskData, held: HeldOut, classes: Sequence[Label], generator: torch.Generator
) -> tuple[TaskData, TaskData]:
    """The training part and the validation part; a fraction is drawn with `generator`, stratified."""
    if not isinstance(held, float):
        x, y = held
        if x.shape[1:] != task.x.shape[2:]:
            shapes = tuple(x.shape[1:]), tuple(task.x.shape[2:])
            raise EvclError(f"validation: its inputs have shape {shapes[0]}, but the task's have {shapes[1]}")
        if isinstance(y, Tensor):  # targets other than classes
            return task, TaskData(x.unsqueeze(0), y.unsqueeze(0).to(x), task.head, task=task.task)
        try:
            places = positions(y, classes).to(x.device)
        except EvclError as error:
            raise EvclError(f"validation: {error}") from None
        return task, TaskData(x.unsqueeze(0), places.unsqueeze(0), task.head, task=task.task)
    count = max(1, round(held * task.y.shape[1]))
    if task.y.is_floating_point():
        order = torch.randperm(task.y.shape[1], generator=generator)
        rows = order[count:].sort().values, order[:count].sort().values
    else:
        rows = stratified(task.y[0].cpu(), count, generator)
    kept, measured = (part.to(task.y.device) for part in rows)
    learned, held_out = (task.select(part.unsqueeze(0)) for part in (kept, measured))
    return learned, held_out
