"""Which networks and filters a stream is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from evcl.streams.bank import Bank
from evcl.streams.experts import Experts
from evcl.streams.filters import Blocks, Diagonal, Filter, LowRank
from evcl.streams.jacobian import Network, default, of
from evcl.streams.observing import Classes, Counts, Labels, Numbers, Observing
from evcl.streams.window import Window

if TYPE_CHECKING:
    from evcl.streams.stream import Stream

MEMORIES = (float("inf"), 2000.0, 300.0)
UNITS = 32  # of the default network's hidden layer
FULL = 600  # weights up to which the covariance is stored in full


def bank_of(stream: Stream, x: Tensor, outputs: int) -> Bank:
    """The experts for rows like x [n, ...]."""
    s = stream.settings
    memories = stream.memories or MEMORIES
    networks = [of(stream.network, x)] if stream.network is not None else [default(x[0].numel(), UNITS, s.seed)]

    def make(mean: Tensor, prior: Tensor, network: Network) -> Filter:
        return filter_of(s.method, s.covariance, s.rank, mean, prior, network)

    groups = [Experts(network, make, memories) for network in networks]
    for group in groups:
        group.observing = _observing(stream, len(group), outputs)
        group.grow(outputs)
    return Bank(groups, blends=stream.likelihood == "categorical")


def filter_of(method: str, covariance: str, rank: int, mean: Tensor, prior: Tensor, network: Network) -> Filter:
    """A filter for the weights below the outputs; those of the outputs are added later."""
    if method == "mesu":
        return Window(mean, prior)
    if covariance == "auto":
        weights = len(prior) + len(network.row)
        covariance = "full" if weights <= FULL else "blocks" if network.groups else "low-rank"
    if covariance == "full":
        return Blocks(mean, prior, [(0, 1, len(prior))])
    if covariance == "blocks":
        return Blocks(mean, prior, [*network.groups, (len(prior), 1, 0)])
    return Diagonal(mean, prior) if covariance == "diagonal" else LowRank(mean, prior, rank)


def _observing(stream: Stream, experts: int, outputs: int) -> Observing:
    if stream.likelihood == "categorical":
        return Classes()
    if stream.likelihood == "bernoulli":
        return Labels()
    return Counts(outputs) if stream.likelihood == "poisson" else Numbers(experts, outputs, stream.noise)
