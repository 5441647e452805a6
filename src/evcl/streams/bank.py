"""The bank: experts, the shares that they have, and the prediction that they make together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from evcl.streams.arrays import Array, joined
from evcl.streams.experts import Experts, Moves, RowPredictions
from evcl.streams.filters import solved
from evcl.streams.forgetting import Overtaking, Powers, Shares, blend
from evcl.streams.observing import Targets
from evcl.streams.state import Stateful

NOTHING = np.empty(0)


class Looked(NamedTuple):
    """What the bank knows of rows before it learns them."""

    x: Array  # [n, ...]
    look: RowPredictions
    every: Array  # [E, n, ...]: the predictions of the experts, of the blend and the mixture, and together
    odds: Array  # [n, K, R]: of the experts, which the blend looks at
    blended: RowPredictions | None

    @property
    def together(self) -> Array:
        """[1, n, ...]"""
        return self.every[-1:]


class Learned(NamedTuple):
    """The memories (slow, fast) of experts where the slow one was replaced by a copy of the fast one, and the
    derivatives e [n, K] and B [n, K, K] of the prediction.
    """

    replaced: list[tuple[float, float]]
    e: Array
    b: Array


class Bank(Stateful):
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
            return Looked(x, look, np.concatenate([predicted, mixed]), NOTHING, None)
        odds = Powers.inputs(predicted)
        blended = self.blend.look(odds)
        first, second = self.ways.shares.tolist()
        together = first * blended.predicted + second * mixed
        return Looked(x, look, np.concatenate([predicted, blended.predicted, mixed, together]), odds, blended)

    def learn(self, looked: Looked, y: Targets, inner_steps: int) -> Learned:
        """Learn rows that the bank has looked at. What the experts and the blend have in common is computed at once."""
        observing, count = self.experts.observing, len(self.experts)
        each = observing.log_likelihood(looked.every, y)
        self.shares.learn(each[:count])
        n, k = looked.look.f.shape[1:]
        e, b = observing.derivatives(looked.every, y) if k else (np.empty((1, n, 0)), np.empty((1, n, 0, 0)))
        looks = [looked.look] if looked.blended is None else [looked.look, looked.blended]
        asked = slice(count + len(looks) - 1)
        variance = joined([look.variance for look in looks])
        moves = Moves(b[asked], *solved(variance, e[asked], b[asked])) if k else None
        if self.blend is not None and looked.blended is not None:
            self.ways.learn(each[count : count + 2])
            self.blend.learn(looked.blended, looked.odds, y, 1, moves and moves.of(slice(count, None)))
        self.experts.learn(looked.look, looked.x, y, inner_steps, moves and moves.of(slice(count)))
        memories, replaced = self.experts.memories, []
        for slow, fast in self.overtaking.learn(each[:count]):
            self.experts.copy(slow, fast)
            replaced.append((memories[slow], memories[fast]))
        return Learned(replaced, e[-1], b[-1])

    def parts(self) -> dict[str, Stateful]:
        found = {"shares": self.shares, "ways": self.ways, "overtaking": self.overtaking, "experts": self.experts}
        return found if self.blend is None else {**found, "blend": self.blend}
