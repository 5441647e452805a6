"""How fast to forget is inferred: experts with different memories are weighed by how well they predicted.

`Shares` are the probabilities that each expert is the right one now (dynamic model averaging): Bayes' rule after every
row, and before every row a small chance that another expert becomes the right one (fixed share: Herbster & Warmuth,
1998). A `blend` multiplies the experts' class probabilities, each to a power that a Kalman filter learns: this also
corrects experts that are too sure or too unsure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evcl._core.errors import EvclError
from evcl.streams.arrays import Array, Stateful, finite, joined, log, total
from evcl.streams.experts import Experts, Moves, RowPredictions
from evcl.streams.filters import Full, solved
from evcl.streams.observing import Classes, Targets

SWITCH_CHANCE = 0.002  # the chance per row that another expert becomes the right one
LOST_LOG_LIKELIHOOD = -1e6  # the log-likelihood of an expert whose prediction is not a number
MIN_PROBABILITY = 1e-6  # a probability that an expert's log is cut at
POWER_PRIOR_VARIANCE = 0.03  # the prior variance of a power
POWER_MEMORY_ROWS = 1000  # rows that the powers are learned from
ROUNDING = 1e-9  # by which the sum of shares may differ from 1
OVERTAKEN_NATS = 12.0  # nats by which a fast expert must predict better to replace a slow one


class Shares(Stateful):
    """The probability [R] of each expert."""

    names = ("log",)

    def __init__(self, experts: int) -> None:
        self.log = np.full(experts, -math.log(experts))

    @property
    def shares(self) -> Array:
        shares: Array = np.exp(self.log)
        return shares

    def learn(self, log_likelihood: Array) -> None:
        """Bayes' rule with the log-likelihoods [R, n] of n rows."""
        r, n = log_likelihood.shape
        after = self.log + _finite(total(log_likelihood))
        stay = (1 - SWITCH_CHANCE) ** n
        weights = np.exp(after - np.maximum.reduce(after))
        self.log = np.log(stay / total(weights) * weights + (1 - stay) / r)

    def restore(self, arrays: Mapping[str, Array]) -> None:
        if abs(total(np.exp(np.minimum(arrays["log"], 1.0))) - 1) > ROUNDING:
            raise EvclError("the shares of its experts do not sum to 1")
        super().restore(arrays)


def _finite(log_likelihood: Array) -> Array:
    if finite(log_likelihood):
        return log_likelihood
    return np.nan_to_num(log_likelihood, nan=LOST_LOG_LIKELIHOOD)


class Powers:
    """p proportional to prod_r p_r^w_r as a network: its inputs are the experts' log odds of each class against the
    first, [n, K, R], and its weights the powers w, 1 / R each before any row.
    """

    def __init__(self, experts: int) -> None:
        self.start = np.full(experts, 1 / experts)
        self.prior = np.full(experts, POWER_PRIOR_VARIANCE)
        self.row = np.empty(0)

    def jacobian(self, weights: Array, x: Array) -> tuple[Array, Array]:
        return (x @ weights[0])[None], x[None]

    @staticmethod
    def inputs(p: Array) -> Array:
        """[n, K, R], from the experts' probabilities p [R, n, K + 1]."""
        logs = log(p, MIN_PROBABILITY)
        return (logs[..., 1:] - logs[..., :1]).transpose(1, 2, 0)


def blend(experts: int) -> Experts:
    """Learns the powers of this many experts."""
    return Experts([Powers(experts)], Full, [POWER_MEMORY_ROWS], Classes())


class Overtaking(Stateful):
    """Notices when an expert that forgets faster has predicted so much better that a slower one must be out of date:
    the sum of differences in log-likelihood since they were last level reaches `OVERTAKEN_NATS`.

    `comparable` [R, R]: whether the first expert has the shape of the second, and forgets faster.
    """

    names = ("ahead",)

    def __init__(self, comparable: NDArray[np.bool_]) -> None:
        self.comparable = comparable
        self.ahead = np.zeros(comparable.shape)  # [a, b]: how far a is ahead of b

    def learn(self, log_likelihood: Array) -> list[tuple[int, int]]:
        """Pairs (slow, fast) in which fast has overtaken slow, from log-likelihoods [R, n] of experts."""
        each = total(log_likelihood)
        self.ahead = np.maximum(self.ahead + each[:, None] - each, 0) * self.comparable
        pairs = []
        while np.maximum.reduce(self.ahead, None) > OVERTAKEN_NATS:
            fast, slow = divmod(int(self.ahead.argmax()), len(each))
            pairs.append((slow, fast))
            self.ahead[:, slow] = 0
            self.ahead[slow] = 0
        return pairs


EMPTY = np.empty(0)


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
            return Looked(x, look, np.concatenate([predicted, mixed]), EMPTY, None)
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
        own = slice(count + len(looks) - 1)
        variance = joined([look.variance for look in looks])
        moves = Moves(b[own], *solved(variance, e[own], b[own])) if k else None
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
        parts = {"shares": self.shares, "ways": self.ways, "overtaking": self.overtaking, "experts": self.experts}
        return parts if self.blend is None else {**parts, "blend": self.blend}
