"""Which rows of a task are learned, and how much each counts: the options `validation`, `patience`, `sample_weight` and
`class_weight` of `learn`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from evcl._core.errors import EvclError
from evcl._core.inputs import Label, positions
from evcl._core.settings import VALIDATION, Setting
from evcl._core.tasks import stratified
from evcl.training import Given, TaskData

PATIENCE_SETTING = Setting(10, "epochs without a smaller NLL on the validation part", low=1, high=1_000_000)
HeldOut = float | tuple[Tensor, Any]  # the fraction to hold out, or validation examples of their own


def requested(validation: object, patience: object, read: Callable[[Any], tuple[Tensor, Any]]) -> HeldOut:
    """The validation part that these options of `learn` request; `read` reads examples. Raises if one is invalid."""
    if patience is not None:
        PATIENCE_SETTING.check("patience", patience)
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


def check_order(data: Any) -> None:
    """Refuse a loader whose examples come in an order that the caller cannot know."""
    if not isinstance(data, DataLoader):
        return
    batches = data.batch_sampler
    whole = batches is None or (type(batches) is BatchSampler and not batches.drop_last)
    sampler = batches.sampler if isinstance(batches, BatchSampler) else data.sampler
    if not whole or not isinstance(sampler, SequentialSampler):
        raise EvclError(
            "sample_weight has one weight per example, in their order, but this DataLoader shuffles or drops examples: "
            "pass its data set, or arrays"
        )


def with_weights(task: Given, sample_weight: object) -> Given:
    """The task with these weights of its examples, without those of weight 0."""
    weights = _checked(sample_weight, len(task.y[0]))
    rows = weights.nonzero().flatten()
    if len(rows) < len(weights):
        y = task.y[0]
        some: Any = task.y[:, rows] if isinstance(task.y, Tensor) else [[y[i] for i in rows.tolist()]]
        task = task._replace(x=task.x[:, rows.to(task.x.device)], y=some)
        weights = weights[rows]
    if bool((weights == weights[0]).all()):  # only ratios matter
        return task
    return task._replace(weights=weights.unsqueeze(0))


def _checked(given: object, examples: int) -> Tensor:
    """[N] in float64, the largest 1."""
    try:
        array = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
    except ValueError as error:
        raise EvclError(f"sample_weight must be an array: {error}") from None
    if array.dtype.kind not in "biuf":
        raise EvclError(f"sample_weight must be numbers, one per example, not {array.dtype}")
    if array.ndim != 1:
        raise EvclError(f"sample_weight must have shape [examples], not {array.shape}")
    if len(array) != examples:
        raise EvclError(f"there are {examples} inputs but {len(array)} values of sample_weight")
    weights = torch.tensor(array.astype("float64"))
    bad = (~(weights >= 0) | weights.isinf()).nonzero().flatten().tolist()
    if bad:
        value = float(weights[bad[0]])
        raise EvclError(f"sample_weight must be finite numbers of at least 0, but row {bad[0]} has {value}")
    if not bool(weights.any()):
        raise EvclError("sample_weight is 0 for every example: there is nothing to learn from")
    return weights / weights.max()


def weighted(task: TaskData, class_weight: object, classes: Sequence[Label]) -> TaskData:
    """The task with weights that are the product of its own and those of its classes, scaled to a mean of 1."""
    own = task.weights
    if class_weight is None and own is None:
        return task
    if class_weight is not None:
        by_class = class_weights(class_weight, classes, task.y[0]).unsqueeze(0)
        own = by_class if own is None else own.cpu() * by_class
    assert own is not None
    if task.weights is not None:
        own = own / own.mean(1, keepdim=True)
    return replace(task, weights=own.to(task.x))


def class_weights(given: object, classes: Sequence[Label], y: Tensor) -> Tensor:
    """[N], on the CPU: the weight of each example, which depends on its class; the weights are scaled to a mean of 1.

    `given` is a mapping {label: weight}, in which missing labels have weight 1; or "balanced": n / (classes seen *
    examples of the class), so that every class counts equally. `y` [N] holds class indices.
    """
    weights = torch.ones(len(classes), dtype=torch.float64)
    if isinstance(given, str) and given == "balanced":
        counts = torch.bincount(y, minlength=len(classes)).cpu().double()
        weights = torch.where(counts > 0, len(y) / (counts.clamp_min(1) * (counts > 0).sum()), weights)
    elif isinstance(given, Mapping):
        for label, weight in given.items():
            if label not in classes:
                raise EvclError(f"class_weight: {label!r} is not among the classes {list(classes)}")
            if isinstance(weight, bool) or not isinstance(weight, Real) or not 0 < float(weight) < math.inf:
                raise EvclError(f"class_weight: the weight of {label!r} must be a number above 0, not {weight!r}")
            weights[classes.index(label)] = float(weight)
    else:
        raise EvclError(f"class_weight must be 'balanced' or a mapping {{label: weight}}, not {given!r}")
    per_row = weights[y.cpu()]
    return per_row / per_row.mean()
