"""Kalman filters on the weights of R networks side by side, which differ in how they store the posterior's covariance.

A filter has the mean [R, P] and the covariance S of the weights *before* the next rows. The outputs of n rows with K
outputs each are linear in the weights near the mean, f + J (theta - mean), with J [R, n, K, P]; m = n K. The likelihood
gives the residual e = d log p / d f and a root B of the curvature, B B' = -d^2 log p / d f^2, both at the prediction:

    V = J S J',   theta = mean + S J' a,   a = e - B (I + B' V B)^-1 B' V e,   S <- S - S J' B (I + B' V B)^-1 B' J S

This is the extended Kalman filter without an inverse of the noise, which classes do not have. If the rows are
linearised again at a new theta, the update still starts from `mean` and S, so that no row counts twice:
e <- e + B B' J (theta - mean).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Network(Protocol):
    """What a filter asks of a network: see jacobian.py."""

    def jacobian(self, weights: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs [R, n, K] for inputs x [n, ...], and J [R, n, K, P]."""
        ...


class Linearisation(Protocol):
    """What rows have to do with the weights. `variance` [R, m, m] is V = J S J'."""

    variance: Tensor

    def along(self, a: Tensor) -> Tensor:
        """[R, P]: S J' a, for a [R, n, K]."""
        ...

    def change(self, weights: Tensor) -> Tensor:
        """[R, n, K]: J times a change of the weights [R, P]."""
        ...


class Filter(Protocol):
    """`mean` [R, P]; `prior` [P] are the variances before any row, which forgetting does not exceed."""

    mean: Tensor
    prior: Tensor

    def look(self, weights: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        """The outputs [R, n, K] at these weights [R, P] for inputs x [n, ...], and the reach of these rows."""
        ...

    def shrink(self, found: Any, b: Tensor, factor: Tensor) -> None:
        """Learn the covariance, from B [R, n, K, K] and L [R, m, m] with L L' = I + B' V B."""
        ...

    def forget(self, kept: Tensor) -> None:
        """Keep this part [R] of what is known, from 0 to 1."""
        ...

    def grow(self, mean: Tensor, prior: Tensor) -> None:
        """Append the weights of an output, independent of the others: means and variances [p]."""
        ...

    def reset(self, targets: Tensor, mean: Tensor) -> None:
        """These networks [R] know nothing again: their weights are N(mean, prior)."""
        ...

    def copy(self, target: int, source: int) -> None:
        """Network `target` becomes a copy of network `source`."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Everything that rows change, by name."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None: ...


class Dense:
    """The reach of rows by J [R, n, K, P] and J S [R, m, P]."""

    def __init__(self, jacobian: Tensor, spread: Tensor) -> None:
        self.jacobian, self.spread = jacobian, spread
        self.variance = spread @ jacobian.flatten(1, 2).mT

    def along(self, a: Tensor) -> Tensor:
        return (a.reshape(len(a), 1, -1) @ self.spread).squeeze(1)

    def change(self, weights: Tensor) -> Tensor:
        return (self.jacobian @ weights.view(len(weights), 1, -1, 1)).squeeze(3)


class TensorFilter:
    """A filter whose state is in tensors with R rows, by the names in `names`."""

    names: Sequence[str] = ("mean",)
    mean: Tensor
    prior: Tensor
    network: Network

    def look(self, weights: Tensor, x: Tensor) -> tuple[Tensor, Dense]:
        f, jacobian = self.network.jacobian(weights, x)
        return f, Dense(jacobian, self.spread(jacobian.flatten(1, 2)))

    def spread(self, jacobian: Tensor) -> Tensor:
        """[R, m, P]: J S, for J [R, m, P]."""
        raise NotImplementedError

    def widen(self, mean: Tensor, prior: Tensor) -> None:
        self.mean = torch.cat([self.mean, mean.expand(len(self.mean), -1)], 1)
        self.prior = torch.cat([self.prior, prior])

    def state(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.names}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        for name in self.names:
            setattr(self, name, state[name].clone())

    def copy(self, target: int, source: int) -> None:
        for tensor in self.state().values():
            tensor[target] = tensor[source]


class Full(TensorFilter):
    """The whole covariance, [R, P, P]."""

    names = ("mean", "covariance")

    def __init__(self, network: Network, mean: Tensor, prior: Tensor) -> None:
        self.network, self.mean, self.prior = network, mean.clone(), prior.clone()
        self.covariance = torch.diag_embed(prior).expand(len(mean), -1, -1).clone()

    def spread(self, jacobian: Tensor) -> Tensor:
        return jacobian @ self.covariance

    def shrink(self, found: Dense, b: Tensor, factor: Tensor) -> None:
        reduced = torch.linalg.solve_triangular(factor, rooted(b, found.spread), upper=False)
        self.covariance.baddbmm_(reduced.mT, reduced, alpha=-1)

    def forget(self, kept: Tensor) -> None:
        inflate(self.covariance, self.prior, kept)

    def grow(self, mean: Tensor, prior: Tensor) -> None:
        size = len(self.prior)
        self.widen(mean, prior)
        wide = torch.diag_embed(self.prior).expand(len(self.mean), -1, -1).clone()
        wide[:, :size, :size] = self.covariance
        self.covariance = wide

    def reset(self, targets: Tensor, mean: Tensor) -> None:
        self.mean[targets], self.covariance[targets] = mean, torch.diag_embed(self.prior)


SLACK = 1.1  # a variance may exceed the prior's by this factor before it is cut back
FLOOR = 1e-3  # of the prior's variance, what forgetting everything adds; it keeps covariances well conditioned


def inflate(covariance: Tensor, prior: Tensor, kept: Tensor) -> None:
    """covariance [R, ..., size, size] / kept [R], in place. Where a variance would exceed the prior's [..., size], its
    row and column are scaled down. What rounding has made lopsided is evened out; forgetting would amplify it.
    """
    if bool((kept == 1).all()):
        return
    kept = kept.view(-1, *[1] * (covariance.dim() - 1))
    covariance.add_(covariance.mT.clone()).mul_(0.5 / kept)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    if bool((variance > SLACK * prior).any()):
        down = (prior / variance.clamp_min(1e-300)).sqrt_().clamp_(max=1.0)
        covariance *= down.unsqueeze(-1)
        covariance *= down.unsqueeze(-2)
    variance += FLOOR * (1 - kept[..., 0]) * prior


class Diagonal(TensorFilter):
    """Independent weights: 1 / v <- 1 / v + (B' J)^2, summed over the rows."""

    names = ("mean", "variance")

    def __init__(self, network: Network, mean: Tensor, prior: Tensor) -> None:
        self.network, self.mean, self.prior = network, mean.clone(), prior.clone()
        self.variance = prior.expand_as(mean).clone()

    def spread(self, jacobian: Tensor) -> Tensor:
        return jacobian * self.variance.unsqueeze(1)

    def shrink(self, found: Dense, b: Tensor, factor: Tensor) -> None:
        self.variance /= 1 + self.variance * (b.mT @ found.jacobian).square().sum((1, 2))

    def forget(self, kept: Tensor) -> None:
        torch.minimum(self.variance / kept.unsqueeze(1), self.prior, out=self.variance)

    def grow(self, mean: Tensor, prior: Tensor) -> None:
        self.widen(mean, prior)
        self.variance = torch.cat([self.variance, prior.expand(len(self.mean), -1)], 1)

    def reset(self, targets: Tensor, mean: Tensor) -> None:
        self.mean[targets], self.variance[targets] = mean, self.prior


class LowRank(TensorFilter):
    """The precision diag(u) + W' W with `rank` rows W (LO-FI: Chang et al., 2023). Rows B' J are appended to W, its
    leading singular vectors are kept, and the diagonal of the rest is added to u.
    """

    names = ("mean", "precision", "rows")

    def __init__(self, network: Network, mean: Tensor, prior: Tensor, rank: int) -> None:
        self.network, self.mean, self.prior, self.rank = network, mean.clone(), prior.clone(), rank
        self.precision = (1 / prior).expand_as(mean).clone()
        self.rows = mean.new_zeros(len(mean), rank, mean.shape[1])

    def spread(self, jacobian: Tensor) -> Tensor:
        """By Woodbury's identity, J (diag(u) + W' W)^-1."""
        scaled = self.rows / self.precision.unsqueeze(1)
        inner = scaled @ self.rows.mT
        inner.diagonal(dim1=1, dim2=2).add_(1)
        found = jacobian / self.precision.unsqueeze(1)
        less: Tensor = torch.cholesky_solve(scaled @ jacobian.mT, torch.linalg.cholesky(inner))
        return found - less.mT @ scaled

    def shrink(self, found: Dense, b: Tensor, factor: Tensor) -> None:
        every = torch.cat([self.rows, (b.mT @ found.jacobian).flatten(1, 2)], 1)
        _, vectors = torch.linalg.eigh(every @ every.mT)  # ascending
        kept = vectors[:, :, -self.rank :].mT @ every
        self.precision += (every.square().sum(1) - kept.square().sum(1)).clamp_min(0)
        self.rows = kept

    def forget(self, kept: Tensor) -> None:
        """Both parts shrink towards the prior's precision."""
        part = kept.unsqueeze(1)
        self.precision = part * self.precision + (1 - part) / self.prior
        self.rows = part.sqrt().unsqueeze(2) * self.rows

    def grow(self, mean: Tensor, prior: Tensor) -> None:
        self.widen(mean, prior)
        count = len(self.mean)
        self.precision = torch.cat([self.precision, (1 / prior).expand(count, -1)], 1)
        self.rows = torch.cat([self.rows, self.rows.new_zeros(count, self.rank, len(prior))], 2)

    def reset(self, targets: Tensor, mean: Tensor) -> None:
        self.mean[targets], self.precision[targets], self.rows[targets] = mean, 1 / self.prior, 0.0


def solved(found: Linearisation, e: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """a [R, n, K]; L [R, m, m] with L L' = I + B' V B; and which networks [R] could not be computed, because their
    covariance has lost its precision. e [R, n, K], b [R, n, K, K].
    """
    r, n, k = e.shape
    if n * k == 1:  # the same in fewer steps
        inner = 1 + b[..., 0].square() * found.variance
        return e / inner, inner.sqrt(), ~(inner.view(r) > 0)
    half = rooted(b, found.variance)  # B' V
    inner = rooted(b, half.mT)
    if k > 1:
        inner = 0.5 * (inner + inner.mT)
    inner.diagonal(dim1=1, dim2=2).add_(1)
    factor, failed = torch.linalg.cholesky_ex(inner)
    less = torch.cholesky_solve(half @ e.reshape(r, n * k, 1), factor)
    return e - (b @ less.view(r, n, k, 1)).squeeze(3), factor, failed != 0


def rooted(b: Tensor, rows: Tensor) -> Tensor:
    """B' rows, for B [R, n, K, K] and rows [R, n K, any]."""
    r, n, k, _ = b.shape
    if k == 1:
        return b.view(r, n, 1) * rows
    return (b.mT @ rows.reshape(r, n, k, -1)).view(r, n * k, -1)


def of_rows(variance: Tensor, n: int) -> Tensor:
    """[R, n, K, K]: the covariance of each row's outputs, from that of all rows [R, m, m]."""
    k = variance.shape[1] // n
    return variance.view(len(variance), n, k, n, k).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
