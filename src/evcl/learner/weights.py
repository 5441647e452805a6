"""The weights of single examples: read and check the option `sample_weight` of `learn`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from evcl._core.errors import EvclError
from evcl._core.inputs import Label, class_weights
from evcl.training import Given, TaskData


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


def with_weights(task: Given, sample_weight: Any) -> Given:
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


def _checked(given: Any, examples: int) -> Tensor:
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


def weighted(task: TaskData, class_weight: Any, classes: Sequence[Label]) -> TaskData:
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
