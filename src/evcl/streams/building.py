"""Which networks and filters a stream is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from evcl._core.errors import EvclError
from evcl.streams.arrays import Array
from evcl.streams.experts import Experts
from evcl.streams.filters import Diagonal, Filter, Full, LowRank, Window
from evcl.streams.forgetting import Bank
from evcl.streams.jacobian import Network, Perceptron, default, of
from evcl.streams.observing import Classes, Counts, Labels, Numbers, Observing
from evcl.streams.units import Units

if TYPE_CHECKING:
    from evcl.streams.stream import Stream

MEMORY_ROWS = (float("inf"), 2000.0, 300.0)
HIDDEN_UNITS = 32  # of the default network's hidden layer
FULL_COVARIANCE_WEIGHTS = 600  # weights of a network with one output up to which the covariance is stored in full,
MAX_COVARIANCE_WEIGHTS = 800  # and of one with all its outputs: from then on, a row would take several ms
LOG_RATE_PRIOR_PART = 16  # the part of the prior variance that the weights of log rates get


def bank_of(stream: Stream, x: Array, outputs: int) -> Bank:
    """The experts for rows like x [n, ...]."""
    s = stream.settings
    memories = stream.memories or MEMORY_ROWS
    networks = [of(stream.network, torch.from_numpy(x))] if stream.network is not None else defaults(x[0].size, s.seed)
    if stream.network is None and stream.likelihood == "poisson":
        for network in networks:
            network.row = network.row / LOG_RATE_PRIOR_PART  # outputs are logs: a wide prior would be a very wide rate

    def make(network: Network, mean: Array, prior: Array) -> Filter:
        return filter_of(s.method, s.covariance, s.rank, network, mean, prior)

    observing = _observing(stream, len(memories) * len(networks), outputs)

    def fit(filter: Filter, more: int) -> Filter:
        wide = s.covariance == "auto" and len(filter.prior) + more > MAX_COVARIANCE_WEIGHTS
        return Units.of_full(filter) if wide and type(filter) is Full and _has_units(filter.network) else filter

    experts = Experts(networks, make, memories, observing, fit)
    experts.grow(outputs)
    return Bank(experts, blends=stream.likelihood == "categorical")


def defaults(inputs: int, seed: int) -> list[Network]:
    """The networks for tables: one hidden layer beside a linear part, and a linear model, which learns faster."""
    return [default(inputs, HIDDEN_UNITS, seed), default(inputs, 0, seed)]


def filter_of(method: str, covariance: str, rank: int, network: Network, mean: Array, prior: Array) -> Filter:
    """A filter for the weights below the outputs; those of the outputs are added later."""
    if method == "mesu":
        return Window(network, mean, prior)
    units = _has_units(network)
    if covariance == "auto":
        small = len(prior) + len(network.row) <= FULL_COVARIANCE_WEIGHTS
        covariance = "full" if small and len(prior) else "units" if units else "full" if small else "low-rank"
    if covariance == "units":
        if not isinstance(network, Perceptron):
            raise EvclError("covariance='units' needs the default network or an evcl.nn.mlp: use 'low-rank'")
        return Units(network, mean, prior)
    if covariance == "full":
        return Full(network, mean, prior)
    return Diagonal(network, mean, prior) if covariance == "diagonal" else LowRank(network, mean, prior, rank)


def _has_units(network: Network) -> bool:
    return isinstance(network, Perceptron)


def _observing(stream: Stream, experts: int, outputs: int) -> Observing:
    if stream.likelihood == "categorical":
        return Classes()
    if stream.likelihood == "bernoulli":
        return Labels()
    return Counts(outputs) if stream.likelihood == "poisson" else Numbers(experts, outputs, stream.noise)
