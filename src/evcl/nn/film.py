"""FiLM (Perez et al., 2018; for continual learning, Loo et al., 2021): each task scales and shifts the trunk's units.

    a <- gamma_t * a + b_t    after every linear layer and convolution, per unit or channel

gamma_t and b_t, the row [2, U] of task t, start at 1 and 0 (see per_task.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter

import torch
from torch import Tensor, nn

from evcl._core.errors import EvclError
from evcl.nn.layer import Weights, along
from evcl.nn.per_task import Kind, Mixture, TaskRows, TaskWeights

EPSILON = 1e-5  # of Adam: a shift before a batch norm has no gradient but rounding errors, which must not move it
# Learning rate, as a multiple of lr / scale, chosen on validation data of the digits. Rows are of the order of 1, so in
# relative terms they move about as fast as the weights. With lr itself, they would hardly move in a task, and the trunk
# would have to change instead.
FILM_RATE_FACTOR = 2.0
CHANNELS_FIRST = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
FILM_LAYERS = (nn.Linear, *CHANNELS_FIRST)  # the plain layers that have FiLM, by exact type
Sites = Mapping[str, slice]  # name of a layer's weight -> its units among all units U of the trunk
Pair = tuple[Tensor, ...]  # gamma and b, [R, units] each


def film_weights(sites: Sites, like: Tensor) -> TaskWeights:
    """A table [R, 0, 2, U] of scales and shifts, for weights like these [R, P]."""
    units = max((span.stop for span in sites.values()), default=0)
    return TaskWeights(Kind(sites, _first, FILM_RATE_FACTOR, True, EPSILON), like.new_zeros(len(like), 0, 2, units))


def _first(sites: Sites, tasks: int, table: Tensor, sources: object) -> Tensor:
    """[R, tasks, 2, U]: gamma = 1 and b = 0."""
    rows = table.new_zeros(len(table), tasks, *table.shape[2:])
    rows[:, :, 0] = 1
    return rows


def scale_and_shift(row: Tensor, site: slice) -> Pair:
    """gamma and b of the units at a site, from a row [R, 2, U]."""
    return row[:, :, site].unbind(1)


class Film:
    """A forward hook: scales and shifts a layer's output by the row of the current task, or of each example's task."""

    def __init__(
        self, weights: Weights, name: str, site: slice, channels_first: bool, part: slice | None = None
    ) -> None:
        """`part`: the layer is this part of the units at the site."""
        self.weights, self.name, self.part = weights, name, part
        self.parts = [((name, which), itemgetter((slice(None), which, site))) for which in (0, 1)]
        self.channels_first, self.second = channels_first, False  # True: the batch is the second axis of the output

    def __call__(self, layer: nn.Module, args: object, y: Tensor) -> Tensor | None:
        rows, task = self.weights.task_rows, self.weights.task
        if rows is None or task is None:
            return None
        if self.second:
            return self._modulated(rows, task, y.transpose(0, 1)).transpose(0, 1)
        return self._modulated(rows, task, y)

    def _modulated(self, rows: TaskRows, task: int | Mixture, y: Tensor) -> Tensor:
        r = self.weights.replicas
        if isinstance(task, Mixture):
            each, left = divmod(len(y), task.places.numel())
            if left:
                raise EvclError(f"{self.name!r} gets {len(y)} rows for {task.places.numel()} examples of several tasks")
            pairs = [self._pair(rows, t) for t in task.tasks]
            tables = (torch.stack(list(parts), 1) for parts in zip(*pairs, strict=True))  # [R, K, units] each
            scale, shift = (t.gather(1, task.places.unsqueeze(2).expand(-1, -1, t.shape[2])) for t in tables)
            shape = (r, task.places.shape[1], each, *y.shape[1:])
            scale, shift = (along(t.unsqueeze(2), len(shape), self.channels_first) for t in (scale, shift))
            return torch.addcmul(shift, y.reshape(shape), scale).view(y.shape)
        scale, shift = self._pair(rows, task)
        if r == 1:
            scale, shift = (along(t.squeeze(0), y.dim() - 1, self.channels_first) for t in (scale, shift))
            return torch.addcmul(shift, y, scale)
        scale, shift = (along(t.unsqueeze(1), y.dim() + 1, self.channels_first) for t in (scale, shift))
        return torch.addcmul(shift, y.reshape(r, -1, *y.shape[1:]), scale).view(y.shape)

    def _pair(self, rows: TaskRows, task: int) -> Pair:
        pair = [rows.part(task, key, of) for key, of in self.parts]
        return tuple(pair if self.part is None else (each[:, self.part] for each in pair))


@torch.no_grad()
def folded_(trunk: nn.Module, weights: TaskWeights, task: int) -> None:
    """Multiply the row of a task, of replica 0, into the weights of a plain trunk."""
    used = [id(p) for module in trunk.modules() for p in module._parameters.values() if p is not None]
    for name, site in weights.kind.parts.items():
        path, _, key = name.rpartition(".")
        module, other = trunk.get_submodule(path), key.replace("weight", "bias")
        weight = module.get_parameter(key)
        if used.count(id(weight)) > 1 or other not in module._parameters:
            raise EvclError(f"film cannot be folded into {name!r}: the weight is shared, or its layer has no bias")
        scale, shift = (t[0].to(weight) for t in scale_and_shift(weights.table[:, task], site))
        weight.mul_(scale.view(-1, *[1] * (weight.dim() - 1)))
        bias = module._parameters[other]
        if bias is None:
            module._parameters[other] = nn.Parameter(shift.clone(), requires_grad=weight.requires_grad)
        else:
            bias.mul_(scale).add_(shift)
