"""Flat buffers with a replica axis, and the layout that names their parts.

Index letters, here and everywhere: r replica, b example, i in, o out, p weight. R replicas are independent networks of
one shape; P is the number of weights in each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import NamedTuple

from torch import Tensor

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
        _extend(self, shapes, stored or {})
        self.size = -(-self.size // align) * align

    def with_shapes(self, shapes: Mapping[str, Shape]) -> Layout:
        """The layout with these names added at its end, or with new shapes for names that it has."""
        if self.shapes.keys() & shapes.keys():
            return Layout({**self.shapes, **shapes})
        layout = copy.copy(self)  # not laid out again: there may be thousands of heads
        layout.shapes, layout.stored, layout.spans = dict(self.shapes), dict(self.stored), dict(self.spans)
        _extend(layout, shapes, {})
        return layout

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
            moved = start.clone()
            if kept:
                moved[:, : self.size] = flat
                return moved
            for name, shape in self.shapes.items():
                if name not in new.shapes:
                    continue
                corner = new.view(moved, name)
                for axis, length in enumerate(shape):
                    corner = corner.narrow(1 + axis, 0, length)
                corner.copy_(self.view(flat, name))
            return moved

        return extended


def _extend(layout: Layout, shapes: Mapping[str, Shape], stored: Mapping[str, Shape]) -> None:
    """Add these names at the end of a layout, in place."""
    for name, shape in shapes.items():
        layout.shapes[name] = shape = tuple(shape)
        layout.stored[name] = shape = stored.get(name, shape)
        layout.spans[name] = slice(layout.size, layout.size + prod(shape))
        layout.size += prod(shape)


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
