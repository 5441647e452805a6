"""FiLM (Perez et al., 2018; for continual learning, Loo et al., 2021): each task scales and shifts the trunk's units.

    a <- gamma_t * a + b_t    after every linear layer and convolution, per unit or channel

gamma_t and b_t, the rows of task t, are point estimates that start at 1 and 0. They have no prior and no penalty: only
task t trains them, so that no other task can change them. They are not part of the posterior: a method never sees them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evcl._core.errors import EvclError
from evcl.nn.layer import Weights

CHANNELS_FIRST = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
KINDS = (nn.Linear, *CHANNELS_FIRST)  # the plain layers that have FiLM, by exact type
Sites = Mapping[str, slice]  # name of a layer's weight -> its units among all units U of the trunk
Pair = tuple[Tensor, Tensor]  # gamma and b, [R, units] each


class Mixture(NamedTuple):
    """The task of each example of a batch, if they differ."""

    tasks: Sequence[int]
    places: Tensor  # [R, B]: position of each example's task in `tasks`

    def of(self, replicas: Sequence[int] | Tensor | slice) -> Mixture:
        return Mixture(self.tasks, self.places[replicas])


class FilmRows:
    """The rows [R, T, 2, U] of all tasks. `own` holds leaf tensors in place of the rows that a step trains."""

    def __init__(self, table: Tensor, sites: Sites, own: Mapping[int, Mapping[str, Pair]] | None = None) -> None:
        self.table, self.sites, self.own = table, sites, own or {}

    def __len__(self) -> int:
        return self.table.shape[1]

    def pair(self, task: int, name: str) -> Pair:
        if task in self.own:
            return self.own[task][name]
        scale, shift = self.table[:, task, :, self.sites[name]].unbind(1)
        return scale, shift

    def of(self, replicas: Sequence[int] | Tensor | slice) -> FilmRows:
        """The rows of these replicas."""
        own = {
            task: {name: (scale[replicas], shift[replicas]) for name, (scale, shift) in pairs.items()}
            for task, pairs in self.own.items()
        }
        return FilmRows(self.table[replicas], self.sites, own)


def first_rows(tasks: int, sites: Sites, like: Tensor) -> Tensor:
    """[R, tasks, 2, U]: gamma = 1 and b = 0, for weights like these [R, P]."""
    units = max((span.stop for span in sites.values()), default=0)
    rows = like.new_zeros(len(like), tasks, 2, units)
    rows[:, :, 0] = 1
    return rows


class Film:
    """A forward hook: scales and shifts a layer's output by the row of the current task, or of each example's task."""

    def __init__(
        self, weights: Weights, name: str, channels_first: bool, part: slice | None = None, second: bool = False
    ) -> None:
        """`part`: the layer is this part of the units. `second`: the batch is the second axis of the output."""
        self.weights, self.name, self.part = weights, name, part
        self.channels_first, self.second = channels_first, second

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor | None:
        rows, task = self.weights.film, self.weights.task
        if not isinstance(rows, FilmRows) or task is None:
            return None
        if self.second:
            return self._modulated(rows, task, y.transpose(0, 1)).transpose(0, 1)
        return self._modulated(rows, task, y)

    def _modulated(self, rows: FilmRows, task: int | Mixture, y: Tensor) -> Tensor:
        r = self.weights.replicas
        if isinstance(task, Mixture):
            each, left = divmod(len(y), task.places.numel())
            if left:
                raise EvclError(f"{self.name!r} gets {len(y)} rows for {task.places.numel()} examples of several tasks")
            pairs = [self._pair(rows, t) for t in task.tasks]
            scale, shift = (_picked(torch.stack(list(parts), 1), task.places) for parts in zip(*pairs, strict=True))
            shape = (r, task.places.shape[1], each, *y.shape[1:])
            scale, shift = (self._spread(t.unsqueeze(2), len(shape)) for t in (scale, shift))
            return torch.addcmul(shift, y.reshape(shape), scale).view(y.shape)
        scale, shift = self._pair(rows, task)
        if r == 1:
            scale, shift = (self._spread(t.squeeze(0), y.dim() - 1) for t in (scale, shift))
            return torch.addcmul(shift, y, scale)
        scale, shift = (self._spread(t.unsqueeze(1), y.dim() + 1) for t in (scale, shift))
        return torch.addcmul(shift, y.reshape(r, -1, *y.shape[1:]), scale).view(y.shape)

    def _pair(self, rows: FilmRows, task: int) -> Pair:
        scale, shift = rows.pair(task, self.name)
        return (scale, shift) if self.part is None else (scale[:, self.part], shift[:, self.part])

    def _spread(self, t: Tensor, axes: int) -> Tensor:
        """[..., units] with axes of length 1 up to this many: before the units, or after them if they are channels."""
        more = [1] * (axes - t.dim())
        return t.view(*t.shape, *more) if self.channels_first else t.view(*t.shape[:-1], *more, t.shape[-1])


def _picked(table: Tensor, places: Tensor) -> Tensor:
    """[R, B, units]: the rows `places` [R, B] of the table [R, K, units]."""
    return table.gather(1, places.unsqueeze(2).expand(-1, -1, table.shape[2]))


@torch.no_grad()
def folded_(trunk: nn.Module, rows: FilmRows, task: int) -> None:
    """Multiply the row of a task, of replica 0, into the weights of a plain trunk."""
    used = [id(p) for module in trunk.modules() for p in module._parameters.values() if p is not None]
    for name in rows.sites:
        path, _, key = name.rpartition(".")
        module, other = trunk.get_submodule(path), key.replace("weight", "bias")
        weight = module.get_parameter(key)
        if used.count(id(weight)) > 1 or other not in module._parameters:
            raise EvclError(f"film cannot be folded into {name!r}: the weight is shared, or its layer has no bias")
        scale, shift = (t[0] for t in rows.pair(task, name))
        weight.mul_(scale.view(-1, *[1] * (weight.dim() - 1)))
        bias = module._parameters[other]
        if bias is None:
            module._parameters[other] = nn.Parameter(shift.clone(), requires_grad=weight.requires_grad)
        else:
            bias.mul_(scale).add_(shift)
