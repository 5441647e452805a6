"""What the memories of sites that learned apart become when their models are merged, as their fields declare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from evcl._core.settings import Settings
from evcl.methods.memories import hows
from evcl.methods.memory import ByKey, Merge
from evcl.nn import Gaussian

M = TypeVar("M")


class Moved(NamedTuple):
    """Where the weights and classes of the base, or of a site, are in the merged model.

    Attributes:
        name: what the user calls it
        place: [P'], the position of each of its weights
        size: P, the number of weights of the merged model
        heads: its head -> the merged model's head, and the position of each class there
        sizes: the number of classes of each head of the merged model
    """

    name: str
    place: Tensor
    size: int
    heads: Mapping[int, tuple[int, Tensor]]
    sizes: Mapping[int, int]

    def whole(self, values: Tensor) -> Tensor:
        """[R, P] in float64, from values [R, P']; 0 for other weights."""
        return values.new_zeros(len(values), self.size, dtype=torch.float64).index_copy_(1, self.place, values.double())

    def by_head(self, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """By the merged model's heads; other keys, such as that of the trunk, stay."""
        return {self.heads[k][0] if k in self.heads else k: value for k, value in values.items()}


def summed(base: Tensor, sites: Sequence[Tensor], share: float = 1.0) -> Tensor:
    """What all rows add up to: the base's sum, and what each site added to it. A site has only this share of it."""
    return base + sum((site - share * base for site in sites), torch.zeros_like(base))


def combined(merge: Merge, base: Tensor | None, sites: Sequence[Tensor | None], share: float = 1.0) -> Tensor:
    """The values of the base and of the sites as one; None for one that has none."""
    known = [one for one in sites if one is not None]
    if merge == "sum":
        start = torch.zeros_like(known[0]) if base is None else base
        return summed(start, [start if one is None else one for one in sites], share)
    if merge == "mean":
        return torch.stack(known or [one for one in (base,) if one is not None]).mean(0)
    return torch.stack([one for one in (base, *known) if one is not None]).amax(0)


def by_key(merge: Merge, every: Sequence[Mapping[int, Tensor]]) -> dict[int, Tensor]:
    """`combined`, for each key that one of these dicts has; the first is the base's."""
    keys = dict.fromkeys(k for some in every for k in some)
    return {k: combined(merge, every[0].get(k), [some.get(k) for some in every[1:]]) for k in keys}


def undeclared(memory: object) -> str | None:
    """The first field that remembers something and does not declare how it merges; None if all do."""
    for name, how in hows(memory).items():
        value = getattr(memory, name)
        if how is None:
            inner = None if hasattr(value, "merged") else undeclared(value)
            if inner is not None:
                return inner
        elif not getattr(how, "merge", "") and not (isinstance(value, (dict, tuple)) and not value):
            return name
    return None


def merged(memories: Sequence[M], moved: Sequence[Moved], q: Gaussian, s: Settings) -> M:
    """The memory of the merged model, whose posterior is q; the first of these memories is the base's.

    A field that is itself a memory may have a method `merged(sites, moved)` in place of declarations.
    """
    values: dict[str, object] = {}
    for name, how in hows(memories[0]).items():
        each = [getattr(memory, name) for memory in memories]
        if how is None:
            whole = hasattr(each[0], "merged")
            values[name] = each[0].merged(each[1:], moved) if whole else merged(each, moved, q, s)
        elif how.merge == "posterior":
            values[name] = q.map(torch.clone)
        elif isinstance(how, ByKey):
            values[name] = by_key(how.merge, [m.by_head(one) for m, one in zip(moved, each, strict=True)])
        else:
            base, *sites = (m.whole(one) for m, one in zip(moved, each, strict=True))
            share = float(s[how.decay]) if how.decay else 1.0
            values[name] = combined(how.merge, base, sites, share).clamp(how.low, how.high).to(each[0])
    return replace(memories[0], **values)  # type: ignore[type-var]
