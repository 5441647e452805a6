"""Networks that learn the same rows and differ in shape and in how fast they forget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evcl.streams.arrays import Array, Stateful, finite, joined, total, transposed
from evcl.streams.filters import Filter, Linearisation, of_rows, solved
from evcl.streams.jacobian import Network
from evcl.streams.observing import Observing, Targets

FORGET_EVERY = 8  # rows after which a filter forgets, for all of them at once
MakeFilter = Callable[[Network, Array, Array], Filter]  # (network, means [r, P], prior variances [P])
Fit = Callable[[Filter, int], Filter]  # the filter to use once this many weights are added


@dataclass
class Group(Stateful):
    """Experts whose networks have one shape: `place` among all experts, and the means of their weights at first."""

    names = ("start",)

    network: Network
    filter: Filter
    start: Array
    place: slice

    def parts(self) -> dict[str, Stateful]:
        return {"filter": self.filter}


@dataclass
class RowPredictions:
    """What R experts know of n rows before they learn them: outputs [R, n, K], the covariances V [R, m, m] of these,
    the reach of the rows in each group, and the predictions [R, n, ...].
    """

    f: Array
    variance: Array
    found: list[Linearisation]
    predicted: Array


class Moves(NamedTuple):
    """How rows move R networks: B, and a, G and `failed` as in `filters.solved`."""

    b: Array
    a: Array
    root: Array
    failed: NDArray[np.bool_]

    def of(self, place: slice) -> Moves:
        """Those of some of the networks."""
        return Moves(self.b[place], self.a[place], self.root[place], self.failed[place])


class Experts(Stateful):
    """A group for each network, with a copy of it for each memory: expert r remembers about `memories[r]` rows;
    infinity: it forgets nothing.
    """

    names = ("waiting",)

    def __init__(
        self,
        networks: Sequence[Network],
        make: MakeFilter,
        memories: Sequence[float],
        observing: Observing,
        fit: Fit = lambda filter, more: filter,
    ) -> None:
        self.observing, self.fit = observing, fit
        self.memories = list(memories) * len(networks)
        self.kept = 1 - 1 / np.array(self.memories, dtype=np.float64)
        self.groups = []
        for i, network in enumerate(networks):
            filter = make(network, np.stack([network.start] * len(memories)), network.prior)
            place = slice(i * len(memories), (i + 1) * len(memories))
            self.groups.append(Group(network, filter, network.start, place))
        self.waiting = 0  # rows that were learned since the filters last forgot

    def __len__(self) -> int:
        return len(self.kept)

    def parts(self) -> dict[str, Stateful]:
        return {**{str(i): group for i, group in enumerate(self.groups)}, "observing": self.observing}

    def grow(self, outputs: int) -> None:
        """Add outputs, whose weights start from 0."""
        for group in self.groups:
            prior = np.tile(group.network.row, outputs)
            group.filter = self.fit(group.filter, len(prior))
            group.filter.grow(np.zeros_like(prior), prior)
            group.start = np.concatenate([group.start, np.zeros_like(prior)])

    def look(self, x: Array) -> RowPredictions:
        return self._at([group.filter.mean for group in self.groups], x)

    def _at(self, weights: Sequence[Array], x: Array) -> RowPredictions:
        looks = [group.filter.look(own, x) for group, own in zip(self.groups, weights, strict=True)]
        f, variance = joined([f for f, _ in looks]), joined([look.variance for _, look in looks])
        predicted = self.observing.predict(f, of_rows(variance, len(x)))
        return RowPredictions(f, variance, [look for _, look in looks], predicted)

    def learn(self, look: RowPredictions, x: Array, y: Targets, inner_steps: int, moves: Moves | None = None) -> None:
        """Learn rows that these experts have looked at, and whose `moves` may be known. Further inner steps linearise
        at the new weights, but start from the weights before the rows.
        """
        if look.f.shape[2]:
            b, a, root, failed = moves or self._moves(look, y)
            for _ in range(inner_steps - 1):
                steps = self._along(look, a)
                look = self._at([group.filter.mean + own for group, own in zip(self.groups, steps, strict=True)], x)
                change = joined([part.change(own) for part, own in zip(look.found, steps, strict=True)])
                b, a, root, failed = self._moves(look, y, change)
            self.observing.learn(look.f, look.variance, a, b, root, y, self.kept)
            for group, part, step in zip(self.groups, look.found, self._along(look, a), strict=True):
                group.filter.mean += step
                group.filter.shrink(part, b[group.place], root[group.place])
                if not finite(group.filter.mean):
                    failed[group.place] |= ~np.isfinite(total(group.filter.mean))
            if failed.any():
                for group in self.groups:
                    group.filter.reset(failed[group.place], group.start)
                self.observing.reset(failed)
        self.waiting += len(x)
        if self.waiting >= FORGET_EVERY:
            for group in self.groups:
                group.filter.forget(self.kept[group.place] ** self.waiting)
            self.waiting = 0

    def _moves(self, look: RowPredictions, y: Targets, change: Array | None = None) -> Moves:
        e, b = self.observing.derivatives(look.predicted, y)
        if change is not None:
            e = e + (b @ (transposed(b) @ change[..., None]))[..., 0]
        return Moves(b, *solved(look.variance, e, b))

    def _along(self, look: RowPredictions, a: Array) -> list[Array]:
        return [part.along(a[group.place]) for group, part in zip(self.groups, look.found, strict=True)]

    def copy(self, target: int, source: int) -> None:
        """Expert `target` becomes a copy of expert `source` of the same group."""
        for group in self.groups:
            if group.place.start <= target < group.place.stop:
                group.filter.copy(target - group.place.start, source - group.place.start)
        self.observing.copy(target, source)
