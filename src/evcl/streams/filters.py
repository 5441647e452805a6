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
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Group = tuple[int, int, int]  # weights from a first one on: this many blocks, of this many weights each


@dataclass
class Reach:
    """What rows have to do with the weights: J, J S [R, m, P], and V = J S J' [R, m, m]."""

    jacobian: Tensor  # [R, n, K, P]
    spread: Tensor
    variance: Tensor

    @property
    def rows(self) -> Tensor:
        """[R, n, K, K]: the covariance of each row's outputs."""
        r, n, k, _ = self.jacobian.shape
        return self.variance.view(r, n, k, n, k).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


class Filter(Protocol):
    """`mean` [R, P]; `prior` [P] are the variances before any row, which forgetting does not exceed."""

    mean: Tensor
    prior: Tensor

    def spread(self, jacobian: Tensor) -> Tensor:
        """[R, m, P]: J S, for J [R, m, P]."""
        ...

    def shrink(self, found: Reach, b: Tensor, root: Tensor) -> None:
        """Learn the covariance, from B [R, n, K, K] and L^-1 B' [R, m, m] with L L' = I + B' V B."""
        ...

    def forget(self, kept: Tensor) -> None:
        """Keep this part [R] of what is known, from 0 to 1."""
        ...

    def grow(self, mean: Tensor, prior: Tensor) -> None:
        """Append weights, independent of the others: means and variances [p]."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Everything that rows change, by name."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None: ...

    def copy(self, target: int, source: int) -> None:
        """Network `target` becomes a copy of network `source`."""
        ...

    def reset(self, targets: Tensor, mean: Tensor) -> None:
        """These networks [R] know nothing again: their weights are N(mean, prior)."""
        ...


class _Kept:
    """State that is kept in tensors with R rows, by the names in `names`."""

    names: Sequence[str] = ()

    def state(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.names}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        for name in self.names:
            setattr(self, name, state[name].clone())

    def copy(self, target: int, source: int) -> None:
        for tensor in self.state().values():
            tensor[target] = tensor[source]


class Blocks(_Kept):
    """A covariance of full blocks on the diagonal: one block, or one for each unit of a layer (Puskorius & Feldkamp,
    1994). `groups` lists blocks of equal size.
    """

    def __init__(self, mean: Tensor, prior: Tensor, groups: Sequence[Group]) -> None:
        self.mean, self.prior, self.groups = mean.clone(), prior.clone(), list(groups)
        self.blocks = [_blocks(self._own(prior, g), len(mean)) for g in groups]

    @staticmethod
    def _own(weights: Tensor, group: Group) -> Tensor:
        start, blocks, size = group
        return weights[..., start : start + blocks * size].unflatten(-1, (blocks, size))

    def spread(self, jacobian: Tensor) -> Tensor:
        if self.groups == [(0, 1, jacobian.shape[2])]:
            whole: Tensor = self.blocks[0][:, 0]
            return jacobian @ whole
        parts = [
            (self._own(jacobian, g).transpose(1, 2) @ block).transpose(1, 2).flatten(2)
            for g, block in zip(self.groups, self.blocks, strict=True)
        ]
        return torch.cat(parts, 2)

    def shrink(self, found: Reach, b: Tensor, root: Tensor) -> None:
        reduced = root @ found.spread
        for g, block in zip(self.groups, self.blocks, strict=True):
            own = self._own(reduced, g).transpose(1, 2).flatten(0, 1)  # [R * blocks, m, size]
            block.flatten(0, 1).baddbmm_(own.mT, own, alpha=-1)

    def forget(self, kept: Tensor) -> None:
        """S / kept, with rows and columns scaled down where a variance would exceed the prior's."""
        if bool((kept == 1).all()):
            return
        for g, block in zip(self.groups, self.blocks, strict=True):
            block /= kept.view(-1, 1, 1, 1)
            most = self._own(self.prior, g)
            variance = block.diagonal(dim1=2, dim2=3)
            if bool((variance > SLACK * most).any()):
                down = (most / variance.clamp_min(1e-300)).sqrt_().clamp_(max=1.0)
                block *= down.unsqueeze(3)
                block *= down.unsqueeze(2)
            block.diagonal(dim1=2, dim2=3).add_(FLOOR * (1 - kept).view(-1, 1, 1) * most)

    def grow(self, mean: Tensor, prior: Tensor) -> None:
        """The new weights join the last block, if it is alone in its group and stays small; else they are a new one."""
        start, blocks, size = self.groups[-1] if self.groups else (0, 0, 0)
        self.mean = torch.cat([self.mean, mean.expand(len(self.mean), -1)], 1)
        self.prior = torch.cat([self.prior, prior])
        if blocks == 1 and size + len(prior) <= LARGEST:
            wide = self.blocks[-1].new_zeros(len(self.mean), 1, size + len(prior), size + len(prior))
            wide[..., :size, :size] = self.blocks[-1]
            wide.diagonal(dim1=2, dim2=3)[..., size:] = prior
            self.groups[-1], self.blocks[-1] = (start, 1, size + len(prior)), wide
        else:
            self.groups.append((start + blocks * size, 1, len(prior)))
            self.blocks.append(_blocks(prior.unsqueeze(0), len(self.mean)))

    def state(self) -> dict[str, Tensor]:
        return {"mean": self.mean, **{f"block {i}": block for i, block in enumerate(self.blocks)}}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.mean = state["mean"].clone()
        self.blocks = [state[f"block {i}"].clone() for i in range(len(self.blocks))]

    def reset(self, targets: Tensor, mean: Tensor) -> None:
        self.mean[targets] = mean
        for g, block in zip(self.groups, self.blocks, strict=True):
            block[targets] = torch.diag_embed(self._own(self.prior, g))


LARGEST = 1000  # weights in a block that grows
SLACK = 1.1  # a variance may exceed the prior's by this factor before it is cut back
FLOOR = 1e-3  # of the prior's variance, what forgetting everything adds


def _blocks(variances: Tensor, replicas: int) -> Tensor:
    """[R, blocks, size, size] from variances [blocks, size]."""
    return torch.diag_embed(variances).expand(replicas, -1, -1, -1).clone()


class Diagonal(_Kept):
    """Independent weights: 1 / v <- 1 / v + (B' J)^2, summed over the rows."""

    names = ("mean", "variance")

    def __init__(self, mean: Tensor, prior: Tensor) -> None:
        self.mean, self.prior = mean.clone(), prior.clone()
        self.variance = prior.expand_as(mean).clone()

    def spread(self, jacobian: Tensor) -> Tensor:
        return jacobian * self.variance.unsqueeze(1)

    def shrink(self, found: Reach, b: Tensor, root: Tensor) -> None:
        self.variance /= 1 + self.variance * (b.mT @ found.jacobian).square().sum((1, 2))

    def forget(self, kept: Tensor) -> None:
        torch.minimum(self.variance / kept.unsqueeze(1), self.prior, out=self.variance)

    def grow(self, mean: Tensor, prior: Tensor) -> None:
        self.mean = torch.cat([self.mean, mean.expand(len(self.mean), -1)], 1)
        self.variance = torch.cat([self.variance, prior.expand(len(self.mean), -1)], 1)
        self.prior = torch.cat([self.prior, prior])

    def reset(self, targets: Tensor, mean: Tensor) -> None:
        self.mean[targets], self.variance[targets] = mean, self.prior


class LowRank(_Kept):
    """The precision diag(u) + W' W with `rank` rows W (LO-FI: Chang et al., 2023). Rows B' J are appended to W, its
    leading singular vectors are kept, and the diagonal of the rest is added to u.
    """

    names = ("mean", "precision", "rows")

    def __init__(self, mean: Tensor, prior: Tensor, rank: int) -> None:
        self.mean, self.prior, self.rank = mean.clone(), prior.clone(), rank
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

    def shrink(self, found: Reach, b: Tensor, root: Tensor) -> None:
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
        count = len(self.mean)
        self.mean = torch.cat([self.mean, mean.expand(count, -1)], 1)
        self.precision = torch.cat([self.precision, (1 / prior).expand(count, -1)], 1)
        self.rows = torch.cat([self.rows, self.rows.new_zeros(count, self.rank, len(prior))], 2)
        self.prior = torch.cat([self.prior, prior])

    def reset(self, targets: Tensor, mean: Tensor) -> None:
        self.mean[targets], self.precision[targets], self.rows[targets] = mean, 1 / self.prior, 0.0


def reach(filter: Filter, jacobian: Tensor) -> Reach:
    """What rows with this J [R, n, K, P] have to do with the weights."""
    flat = jacobian.flatten(1, 2)
    spread = filter.spread(flat)
    return Reach(jacobian, spread, spread @ flat.mT)


def solved(filter: Filter, found: Reach, e: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """theta [R, P]; L^-1 B' [R, m, m] with L L' = I + B' V B; and which networks [R] could not be computed, because
    their covariance has lost its precision. e [R, n, K], b [R, n, K, K].
    """
    r, n, k = e.shape
    half = (b.mT @ found.variance.view(r, n, k, n * k)).view(r, n * k, n, k)  # B' V
    inner = (half.transpose(1, 2) @ b).transpose(1, 2).reshape(r, n * k, n * k)
    inner = 0.5 * (inner + inner.mT)
    inner.diagonal(dim1=1, dim2=2).add_(1)
    factor, failed = torch.linalg.cholesky_ex(inner)
    less = torch.cholesky_solve(half.flatten(2) @ e.reshape(r, n * k, 1), factor).view(r, n, k, 1)
    a = (e.unsqueeze(3) - b @ less).reshape(r, n * k, 1)
    theta = filter.mean + (found.spread.mT @ a).squeeze(2)
    wide = b.new_zeros(r, n, k, n, k)
    wide.diagonal(dim1=1, dim2=3).copy_(b.permute(0, 3, 2, 1))
    root: Tensor = torch.linalg.solve_triangular(factor, wide.view(r, n * k, n * k), upper=False)
    return theta, root, (failed != 0) | ~theta.isfinite().all(1)
