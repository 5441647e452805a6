"""Networks of one shape that learn the same rows and differ in how fast they forget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evcl.streams.filters import Filter, Linearisation, of_rows, solved
from evcl.streams.jacobian import Network
from evcl.streams.observing import Observing

TOGETHER = 8  # rows after which a filter forgets, for all of them at once
MakeFilter = Callable[[Network, Tensor, Tensor], Filter]  # (network, means [R, P], prior variances [P])


@dataclass
class RowPredictions:
    """What the experts know of n rows before they learn them: outputs [R, n, K], their reach, and the predictions."""

    f: Tensor
    found: Linearisation
    predicted: Tensor


class Experts:
    """R copies of a network. Expert r remembers about `memories[r]` rows; infinity: it forgets nothing."""

    def __init__(self, network: Network, make: MakeFilter, memories: Sequence[float]) -> None:
        self.network = network
        self.memories = list(memories)
        self.kept = 1 - 1 / torch.tensor(self.memories, dtype=torch.float64)
        self.start = network.start
        self.filter = make(network, network.start.expand(len(memories), -1), network.prior)
        self.observing: Observing
        self.waiting = 0  # rows that were learned since the filter last forgot

    def __len__(self) -> int:
        return len(self.kept)

    def grow(self, outputs: int) -> None:
        """Add outputs, whose weights start from 0."""
        row = self.network.row
        for _ in range(outputs):
            self.filter.grow(torch.zeros_like(row), row)
            self.start = torch.cat([self.start, torch.zeros_like(row)])

    def look(self, x: Tensor) -> RowPredictions:
        return self._at(self.filter.mean, x)

    def _at(self, weights: Tensor, x: Tensor) -> RowPredictions:
        f, found = self.filter.look(weights, x)
        return RowPredictions(f, found, self.observing.predict(f, of_rows(found.variance, len(x))))

    def learn(self, look: RowPredictions, x: Tensor, y: Tensor, inner_steps: int) -> None:
        """Learn rows that these experts have looked at. Further inner steps linearise at the new weights, but start
        from the weights before the rows.
        """
        kept = self.kept ** len(x)
        if look.f.shape[2]:
            first = self.filter.mean
            e, b = self.observing.derivatives(look.predicted, y)
            a, factor, failed = solved(look.found, e, b)
            for _ in range(inner_steps - 1):
                moved = look.found.along(a)
                look = self._at(first + moved, x)
                e, b = self.observing.derivatives(look.predicted, y)
                e = e + (b @ (b.mT @ look.found.change(moved).unsqueeze(3))).squeeze(3)
                a, factor, failed = solved(look.found, e, b)
            self.filter.mean = first + look.found.along(a)
            self.observing.learn(look.f, look.found.variance, a, b, factor, y, kept)
            self.filter.shrink(look.found, b, factor)
            failed |= ~self.filter.mean.sum(1).isfinite()
            if bool(failed.any()):
                self.filter.reset(failed, self.start)
        self.waiting += len(x)
        if self.waiting >= TOGETHER:
            self.filter.forget(self.kept**self.waiting)
            self.waiting = 0

    def state(self) -> dict[str, Tensor]:
        found = {"start": self.start, "waiting": torch.tensor(self.waiting)}
        found |= {f"filter/{name}": tensor for name, tensor in self.filter.state().items()}
        return found | {f"observing/{name}": tensor for name, tensor in self.observing.state().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.start, self.waiting = state["start"].clone(), int(state["waiting"])
        for part, to in (("filter/", self.filter), ("observing/", self.observing)):
            to.restore({name.removeprefix(part): t for name, t in state.items() if name.startswith(part)})
