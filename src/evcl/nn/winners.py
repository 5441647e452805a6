"""k-winners: a ReLU that keeps only the units with the largest outputs, for each example.

    y_i = relu(x_i) if relu(x_i) is among the k largest of the layer's u units, otherwise 0;   k = ceil(fraction u)

With positions (a convolution), the units are channels, each with the sum of its outputs over all positions: a channel
wins or loses as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from evcl.nn.layer import BayesianLayer


class Gate(Protocol):
    """What the k-winners of a network report to in training: see `Weights.gate`."""

    def drop(self, h: Tensor, layer: KWinnersLayer) -> Tensor:
        """The outputs h [R, B, u, ...] of all units, with some of them set to 0, of which the winners are chosen."""
        ...

    def won(self, y: Tensor, layer: KWinnersLayer) -> None:
        """Called with the outputs of the winners, [R, B, u, ...]; called once for each call of `drop`."""
        ...


class KWinners(nn.Module):
    """Keep a `fraction` of the units: one number, or one per replica."""

    def __init__(self, fraction: float | Sequence[float]) -> None:
        super().__init__()
        self.fractions = [float(fraction)] if isinstance(fraction, (int, float)) else [float(f) for f in fraction]

    def forward(self, x: Tensor) -> Tensor:
        return winners(x.relu().unsqueeze(0), counts(self.fractions[:1], x.shape[1])).squeeze(0)


class KWinnersLayer(BayesianLayer):
    """KWinners for replicas, with a gate in training."""

    def __init__(self, layer: KWinners) -> None:
        super().__init__(layer)
        self.fractions = layer.fractions
        self._counts: dict[tuple[int, torch.device], Tensor] = {}  # copied to a device once, not in a CUDA graph

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.unfold(x).relu(), self.weights.gate
        if gate is not None:
            h = gate.drop(h, self)
        y = winners(h, self.counts(h))
        if gate is not None:
            gate.won(y.detach(), self)
        return y.flatten(0, 1)

    def counts(self, h: Tensor) -> int | Tensor:
        """The number of winners out of h [R, B, u, ...]: one for all replicas, or [R]."""
        winners = counts(self.fractions, h.shape[2])
        if isinstance(winners, int):
            return winners
        key = h.shape[2], h.device
        if key not in self._counts:
            self._counts[key] = winners.to(h.device)
        return self._counts[key] if self.weights.rows is None else self._counts[key][self.weights.rows]


def counts(fractions: Sequence[float], units: int) -> int | Tensor:
    """The number of winners, if it is the same for all fractions, or one for each as a tensor."""
    each = [min(units, max(1, math.ceil(f * units - 1e-9))) for f in fractions]
    return each[0] if len(set(each)) == 1 else torch.tensor(each)


def winners(h: Tensor, k: int | Tensor) -> Tensor:
    """h [R, B, u, ...], at least 0, with all but the k largest units of each example set to 0."""
    scores = h.flatten(3).sum(3) if h.dim() > 3 else h
    if isinstance(k, int):
        least = scores.detach().topk(k, dim=2).values[:, :, -1:]
    else:
        place = (k - 1).view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        least = scores.detach().sort(dim=2, descending=True).values.gather(2, place)
    won = (scores >= least).to(h)
    return h * won.view(*won.shape, *[1] * (h.dim() - 3))
