"""Networks of one shape that learn the same rows and differ in how fast they forget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evcl.streams.filters import Filter, Reach, reach, solved
from evcl.streams.jacobian import Network
from evcl.streams.observing import Observing

MakeFilter = Callable[[Tensor, Tensor, Network], Filter]  # (means [R, P], prior variances [P], network)


@dataclass
class Look:
    """What the experts know of n rows before they learn them: outputs [R, n, K], their reach, and the predictions."""

    f: Tensor
    found: Reach
    predicted: Tensor


class Experts:
    """R copies of a network. Expert r remembers about `memories[r]` rows; infinity: it forgets nothing."""

    def __init__(self, network: Network, make: MakeFilter, memories: Sequence[float]) -> None:
        self.network = network
        self.memories = list(memories)
        self.kept = 1 - 1 / torch.tensor(self.memories, dtype=torch.float64)
        self.start = network.start
        self.filter = make(network.start.expand(len(memories), -1), network.prior, network)
        self.observing: Observing

    def __len__(self) -> int:
        return len(self.kept)

    def memory(self, expert: int) -> float:
        """How many rows it remembers."""
        return self.memories[expert]

    def grow(self, outputs: int) -> None:
        """Add outputs, whose weights start from 0."""
        row = self.network.row
        for _ in range(outputs):
            self.filter.grow(torch.zeros_like(row), row)
            self.start = torch.cat([self.start, torch.zeros_like(row)])

    def look(self, x: Tensor) -> Look:
        return self._at(self.filter.mean, x)

    def _at(self, weights: Tensor, x: Tensor) -> Look:
        f, jacobian = self.network.jacobian(weights, x)
        found = reach(self.filter, jacobian)
        return Look(f, found, self.observing.predict(f, found.rows))

    def learn(self, look: Look, x: Tensor, y: Tensor, inner_steps: int) -> None:
        """Learn rows that these experts have looked at. Further inner steps linearise at the new weights, but start
        from the weights before the rows.
        """
        kept = self.kept ** len(x)
        if look.f.shape[2]:
            e, b = self.observing.derivatives(look.predicted, y)
            theta, root, failed = solved(self.filter, look.found, e, b)
            for _ in range(inner_steps - 1):
                look = self._at(theta, x)
                e, b = self.observing.derivatives(look.predicted, y)
                moved = (look.found.jacobian @ (theta - self.filter.mean).view(len(theta), 1, -1, 1)).squeeze(3)
                e = e + (b @ (b.mT @ moved.unsqueeze(3))).squeeze(3)
                theta, root, failed = solved(self.filter, look.found, e, b)
            self._noise(look, theta, root, y, kept)
            self.filter.shrink(look.found, b, root)
            self.filter.mean = theta
            if bool(failed.any()):
                self.filter.reset(failed, self.start)
        self.filter.forget(kept)

    def _noise(self, look: Look, theta: Tensor, root: Tensor, y: Tensor, kept: Tensor) -> None:
        """The outputs after the rows, linearised at the last step: from these the noise is learned."""
        r, n, k = look.f.shape
        less = root @ look.found.variance
        after = look.found.variance - less.mT @ less
        rows = after.view(r, n, k, n, k).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
        f = look.f + (look.found.jacobian @ (theta - self.filter.mean).view(r, 1, -1, 1)).squeeze(3)
        self.observing.learn(f, rows, y, kept)

    def state(self) -> dict[str, Tensor]:
        own = {"start": self.start} | {f"filter/{name}": tensor for name, tensor in self.filter.state().items()}
        return own | {f"observing/{name}": tensor for name, tensor in self.observing.state().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.start = state["start"].clone()
        for part, to in (("filter/", self.filter), ("observing/", self.observing)):
            to.restore({name.removeprefix(part): t for name, t in state.items() if name.startswith(part)})
