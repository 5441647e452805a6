"""The bank: experts, the shares that they have, and the prediction that they make together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from evcl.streams.arrays import Array
from evcl.streams.experts import Experts, RowPredictions
from evcl.streams.forgetting import Overtaking, Powers, Shares, blend
from evcl.streams.observing import Targets


class Blended(NamedTuple):
    """The two ways to predict classes together: from the experts' odds [n, K, R], and by their shares [1, n, C]."""

    odds: Array
    look: RowPredictions
    mixed: Array


class Looked(NamedTuple):
    """What the bank knows of rows before it learns them."""

    x: Array  # [n, ...]
    look: RowPredictions
    together: Array  # [1, n, ...]: the prediction
    blended: Blended | None


class Bank:
    """Experts, and their prediction together. With `blends`, they predict classes, which are blended."""

    def __init__(self, experts: Experts, blends: bool) -> None:
        self.experts = experts
        self.shares = Shares(len(experts))
        self.blend = blend(len(experts)) if blends else None
        self.ways = Shares(2)  # the blend, and the mixture
        kept = experts.kept
        shape = np.concatenate([np.full(len(kept[group.place]), i) for i, group in enumerate(experts.groups)])
        self.overtaking = Overtaking((kept[:, None] < kept) & (shape[:, None] == shape))

    def look(self, x: Array) -> Looked:
        look = self.experts.look(x)
        predicted = look.predicted
        mixed = self.experts.observing.mixed(predicted, self.shares.shares)
        if self.blend is None or predicted.shape[2] < 2:
            return Looked(x, look, mixed, None)
        odds = Powers.inputs(predicted)
        own = self.blend.look(odds)
        first, second = self.ways.shares.tolist()
        return Looked(x, look, first * own.predicted + second * mixed, Blended(odds, own, mixed))

    def learn(self, looked: Looked, y: Targets, inner_steps: int) -> list[tuple[float, float]]:
        """Learn rows that the bank has looked at. Returns the memories (slow, fast) of experts where the slow one was
        replaced by a copy of the fast one.
        """
        each = self.experts.observing.log_likelihood(looked.look.predicted, y)
        self.shares.learn(each)
        if self.blend is not None and looked.blended is not None:
            both = np.concatenate([looked.blended.look.predicted, looked.blended.mixed])
            self.ways.learn(self.blend.observing.log_likelihood(both, y))
            self.blend.learn(looked.blended.look, looked.blended.odds, y, 1)
        self.experts.learn(looked.look, looked.x, y, inner_steps)
        memories, replaced = self.experts.memories, []
        for slow, fast in self.overtaking.learn(each):
            self.experts.copy(slow, fast)
            replaced.append((memories[slow], memories[fast]))
        return replaced

    def _parts(self) -> dict[str, Any]:
        found = {"shares/": self.shares, "ways/": self.ways, "overtaking/": self.overtaking}
        blended = {} if self.blend is None else {"blend/": self.blend}
        return found | blended | {"experts/": self.experts}

    def state(self) -> dict[str, Array]:
        return joined(self._parts())

    def restore(self, state: Mapping[str, Array]) -> None:
        restore(self._parts(), state)


def joined(parts: Mapping[str, Any]) -> dict[str, Array]:
    """The states of all parts, each with its prefix before the names."""
    return {f"{prefix}{name}": array for prefix, own in parts.items() for name, array in own.state().items()}


def restore(parts: Mapping[str, Any], state: Mapping[str, Array]) -> None:
    """The inverse of `joined`."""
    for prefix, own in parts.items():
        own.restore({name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)})
