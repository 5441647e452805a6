"""The posterior: flat buffers with a replica axis, and the layout that names their parts.

Index letters, here and everywhere: r replica, b example, i in, o out, p weight. R replicas are independent networks of
one shape; P is the number of weights in each.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from evcl._core.devices import double
from evcl._core.errors import EvclError

Shape = tuple[int, ...]
Extending = Callable[[Tensor, Tensor], Tensor]  # a buffer, and initial values in the new layout -> the buffer there


class Layout:
    """The position of each named tensor along the flat axis P.

    With `stored`, a tensor is part of a larger one of that shape; the rest is padding, and stays 0.
    """

    def __init__(self, shapes: Mapping[str, Shape], stored: Mapping[str, Shape] | None = None, align: int = 1) -> None:
        """P is rounded up to a multiple of `align`."""
        self.shapes: dict[str, Shape] = {}
        self.stored: dict[str, Shape] = {}
        self.spans: dict[str, slice] = {}
        self.size = 0
        self._add(shapes, stored or {})
        self.size = -(-self.size // align) * align

    def _add(self, shapes: Mapping[str, Shape], stored: Mapping[str, Shape]) -> None:
        for name, shape in shapes.items():
            self.shapes[name] = shape = tuple(shape)
            self.stored[name] = shape = stored.get(name, shape)
            self.spans[name] = slice(self.size, self.size + prod(shape))
            self.size += prod(shape)

    def with_shapes(self, shapes: Mapping[str, Shape]) -> Layout:
        """The layout with these names added at its end, or with new shapes for names that it has."""
        if self.shapes.keys() & shapes.keys():
            return Layout({**self.shapes, **shapes})
        found = copy.copy(self)  # not laid out again: there may be thousands of heads
        found.shapes, found.stored, found.spans = dict(self.shapes), dict(self.stored), dict(self.spans)
        found._add(shapes, {})
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and (list(self.shapes.items()), self.stored) == (
            list(other.shapes.items()),
            other.stored,
        )

    __hash__ = None  # type: ignore[assignment]

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The named part of `flat` [..., P] as [..., *shape]; a view, not a copy."""
        part = flat[..., self.spans[name]].view((*flat.shape[:-1], *self.stored[name]))
        for axis, length in enumerate(self.shapes[name]):
            if part.shape[flat.dim() - 1 + axis] != length:
                part = part.narrow(flat.dim() - 1 + axis, 0, length)
        return part

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {name: self.view(flat, name) for name in self.shapes}

    def part(self, names: Iterable[str], stored: Mapping[str, Shape] | None = None, align: int = 1) -> Layout:
        """The layout of these names alone, in this order."""
        return Layout({name: self.shapes[name] for name in names}, stored, align)

    def gather(self, flat: Tensor, part: Layout) -> Tensor:
        """A contiguous copy [..., P'] of the `part` of `flat` [..., P]."""
        copy = flat.new_zeros(*flat.shape[:-1], part.size)
        for name in part.shapes:
            part.view(copy, name).copy_(self.view(flat, name))
        return copy

    def scatter_(self, flat: Tensor, part: Layout, values: Tensor) -> None:
        """Write `values`, in the layout of `part`, back into `flat`: the inverse of `gather`."""
        for name in part.shapes:
            self.view(flat, name).copy_(part.view(values, name))

    def extending(self, new: Layout) -> Extending:
        """A function that moves buffers [R, P] to a layout in which names were added, grew along some of their axes, or
        are left out. New values come from its second argument [R, P'], which has the new layout.
        """
        # heads are added at the end: then the rest moves in one piece, however many there are
        kept = self.spans.items() <= new.spans.items() and self.stored.items() <= new.stored.items()

        def extended(flat: Tensor, start: Tensor) -> Tensor:
            found = start.clone()
            if kept:
                found[:, : self.size] = flat
                return found
            for name, shape in self.shapes.items():
                if name not in new.shapes:
                    continue
                corner = new.view(found, name)
                for axis, length in enumerate(shape):
                    corner = corner.narrow(1 + axis, 0, length)
                corner.copy_(self.view(flat, name))
            return found

        return extended


class Part(NamedTuple):
    """The weights that a fit uses, among all weights of the network.

    Attributes:
        whole: the layout of all weights
        layout: that of the fit's weights
    """

    whole: Layout
    layout: Layout

    def gather(self, values: Tensor) -> Tensor:
        """[..., P'] for the fit's weights: a copy of their part of `values` [..., P] over all weights."""
        return self.whole.gather(values, self.layout)


@dataclass
class Gaussian:
    """N(mean, exp(log_std)^2) over every weight, both [R, P]; point weights at `mean` if log_std is None.

    `layout`, if known, names the parts of P.
    """

    mean: Tensor
    log_std: Tensor | None
    layout: Layout | None = field(default=None, compare=False, repr=False)

    def part(self, name: str) -> Tensor:
        """The means of the weights of this name: a view [R, *shape]."""
        if self.layout is None:
            raise ValueError("these weights have no layout")
        return self.layout.view(self.mean, name)

    def map(self, change: Callable[[Tensor], Tensor], layout: Layout | None = None) -> Gaussian:
        """Apply `change` to the means and to the log standard deviations."""
        return Gaussian(change(self.mean), None if self.log_std is None else change(self.log_std), layout)

    def snapshot(self) -> Gaussian:
        """A copy that later training does not change."""
        log_std = None if self.log_std is None else self.log_std.detach().clone()
        return Gaussian(self.mean.detach().clone(), log_std)

    def variance(self) -> Tensor | None:
        return None if self.log_std is None else (2 * self.log_std).exp()

    def kl(self, prior: Gaussian) -> Tensor:
        """[R]: KL(self || prior), summed over the weights.

        KL = sum_p log(s0/s) + (s^2 + (m - m0)^2) / (2 s0^2) - 1/2,   self = N(m, s^2), prior = N(m0, s0^2)
        """
        if self.log_std is None or prior.log_std is None:
            raise ValueError("a KL divergence needs two Gaussians with a standard deviation")
        difference = (self.mean - prior.mean).square() + (2 * self.log_std).exp()
        return (prior.log_std - self.log_std + 0.5 * difference * (-2 * prior.log_std).exp() - 0.5).sum(1)


class Prior(NamedTuple):
    """A first prior of your own for `Learner(prior=...)`: Gaussians over the network's weights, by their names.

    Attributes:
        means: name of the parameter -> means, of its shape
        stds: name of the parameter -> standard deviations, of its shape
    """

    means: Mapping[str, Tensor]
    stds: Mapping[str, Tensor]

    def flat(self, layout: Layout, like: Tensor) -> Gaussian:
        """The Gaussian [1, P] over the weights of this layout, all of which it must have; others are left out."""
        rows = like.new_empty(1, layout.size), like.new_empty(1, layout.size)
        for name, shape in layout.shapes.items():
            for flat, given, what in ((rows[0], self.means, "mean"), (rows[1], self.stds, "standard deviation")):
                if name not in given:
                    raise EvclError(f"the prior has no {what} for {name!r}: it must have one for each of the weights")
                found = torch.as_tensor(given[name])
                if tuple(found.shape) != shape:
                    came = tuple(found.shape)
                    raise EvclError(f"the prior's {what} of {name!r} is {came}, but the weight is {shape}")
                layout.view(flat, name).copy_(found.detach())
        if not bool(rows[0].isfinite().all() and rows[1].isfinite().all() and (rows[1] > 0).all()):
            raise EvclError("a prior's means must be finite, and its standard deviations finite and above 0")
        return Gaussian(rows[0], rows[1].log())


def log_stds(
    std: float | Sequence[float] | Tensor | str,
    scales: Mapping[str, float],
    layout: Layout,
    like: Tensor,
    part: float = 1.0,
) -> Tensor:
    """The log of standard deviations. If `std` is numbers, one per replica or one for all, it is [R, 1] or [1, 1]; if
    it is "auto", it is [1, P], from `part` times the scale of each name.
    """
    if not isinstance(std, str):
        wide = double(std) if isinstance(std, Tensor) else torch.tensor(std, dtype=torch.float64)
        return wide.reshape(-1, 1).log().to(like)
    each = torch.tensor([math.log(part * scales[name]) for name in layout.spans], dtype=torch.float64)
    sizes = torch.tensor([span.stop - span.start for span in layout.spans.values()], dtype=torch.long)
    return each.repeat_interleave(sizes).to(like).unsqueeze(0)


def he_std(fan_in: int) -> float:
    """sqrt(2 / fan_in), which makes a unit's output about as large as its inputs, for any number of inputs."""
    return math.sqrt(2 / max(1, fan_in))


def he_uniform(shape: Sequence[int], fan_in: float, source: torch.Generator) -> Tensor:
    """Draw from U(-b, b) with b = sqrt(6 / fan_in), in float64 so that every precision starts from the same draw."""
    bound = math.sqrt(6 / max(1, fan_in))
    return torch.empty(tuple(shape), dtype=torch.float64).uniform_(-bound, bound, generator=source)
