"""The bank: groups of experts, the shares that they have, and the prediction that they make together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evcl.streams.experts import Experts, RowPredictions
from evcl.streams.forgetting import Overtaking, Powers, Shares, blend


class Blended(NamedTuple):
    """The two ways to predict classes together: from the experts' odds [n, K, R], and by their shares [1, n, C]."""

    odds: Tensor
    look: RowPredictions
    mixed: Tensor


class Looked(NamedTuple):
    """What the bank knows of rows before it learns them."""

    x: Tensor  # [n, ...]
    looks: list[RowPredictions]  # of each group
    together: Tensor  # [1, n, ...]: the prediction
    blended: Blended | None


class Bank:
    """Groups of experts; those of a group have one shape. With `blends`, they predict classes, which are blended."""

    def __init__(self, groups: Sequence[Experts], blends: bool) -> None:
        self.groups = list(groups)
        count = sum(map(len, groups))
        self.shares = Shares(count)
        self.blend = blend(count) if blends else None
        self.ways = Shares(2)  # the blend, and the mixture
        kept = torch.cat([group.kept for group in groups])
        shape = torch.cat([torch.full((len(group),), i) for i, group in enumerate(groups)])
        self.overtaking = Overtaking((kept.unsqueeze(1) < kept) & (shape.unsqueeze(1) == shape))

    @property
    def memories(self) -> list[float]:
        return [memory for group in self.groups for memory in group.memories]

    def look(self, x: Tensor) -> Looked:
        looks = [group.look(x) for group in self.groups]
        predicted = torch.cat([look.predicted for look in looks])
        mixed = self.groups[0].observing.mixed(predicted, self.shares.shares)
        if self.blend is None or predicted.shape[2] < 2:
            return Looked(x, looks, mixed, None)
        odds = Powers.inputs(predicted)
        own = self.blend.look(odds)
        first, second = self.ways.shares
        return Looked(x, looks, first * own.predicted + second * mixed, Blended(odds, own, mixed))

    def learn(self, looked: Looked, y: Tensor, inner_steps: int) -> list[tuple[float, float]]:
        """Learn rows that the bank has looked at. Returns the memories (slow, fast) of experts where the slow one was
        replaced by a copy of the fast one.
        """
        pairs = list(zip(self.groups, looked.looks, strict=True))
        each = torch.cat([group.observing.log_likelihood(look.predicted, y) for group, look in pairs])
        self.shares.learn(each)
        if self.blend is not None and looked.blended is not None:
            both = torch.cat([looked.blended.look.predicted, looked.blended.mixed])
            self.ways.learn(self.blend.observing.log_likelihood(both, y))
            self.blend.learn(looked.blended.look, looked.blended.odds, y, 1)
        for group, look in pairs:
            group.learn(look, looked.x, y, inner_steps)
        memories, replaced = self.memories, []
        for slow, fast in self.overtaking.learn(each):
            first = 0
            for group in self.groups:
                if first <= slow < first + len(group):
                    group.filter.copy(slow - first, fast - first)
                first += len(group)
            replaced.append((memories[slow], memories[fast]))
        return replaced

    def grow(self, outputs: int) -> None:
        for group in self.groups:
            group.grow(outputs)

    def _parts(self) -> dict[str, Any]:
        found = {"shares/": self.shares, "ways/": self.ways, "overtaking/": self.overtaking}
        blended = {} if self.blend is None else {"blend/": self.blend}
        return found | blended | {f"{i}/": group for i, group in enumerate(self.groups)}

    def state(self) -> dict[str, Tensor]:
        return joined(self._parts())

    def restore(self, state: Mapping[str, Tensor]) -> None:
        restore(self._parts(), state)


def joined(parts: Mapping[str, Any]) -> dict[str, Tensor]:
    """The states of all parts, each with its prefix before the names."""
    return {f"{prefix}{name}": tensor for prefix, own in parts.items() for name, tensor in own.state().items()}


def restore(parts: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """The inverse of `joined`."""
    for prefix, own in parts.items():
        own.restore({name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)})
