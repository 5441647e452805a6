"""Precisions over the weights [W, b] of a layer that are a Kronecker product G (x) A, or a sum of them.

With D [o, i] a change of [W, b], the precision times D is sum_k G_k D A_k, and a draw from one product is
L_G Z L_A^T, with L_G L_G^T = G^-1, L_A L_A^T = A^-1 and Z standard normal.

One product stands for the factors (A, G) of earlier evidence and (B, H) of new evidence:

    sum       A + B, G + H (Ritter et al., 2018): for tasks that are alike, this grows as the square of their number
    pi        A + B / pi, G + pi H, pi^2 = tr G tr B / (tr H tr A) (Kao et al., 2021): the same for any units of A and G
    nearest   the product that is nearest to A (x) G + B (x) H in the sum of squares: exact for tasks that are alike
    tasks     none: both are kept
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl.posterior.layout import Layout

TINY = 1e-30
ROUNDS = 50  # of the iteration for the nearest product
Pair = tuple[Tensor, Tensor]  # A [R, K, i, i], or [R, K, i] if it is diagonal; G [R, K, o, o]
Factors = dict[str, Pair]  # the key of a block -> its factors


class Block(NamedTuple):
    """The weights that a pair of factors is about, as a matrix D [R, o, i] or, with a bias, [R, o, i + 1]."""

    weight: str
    rows: slice  # of the weight, along its first axis
    bias: str | None
    bias_rows: slice
    table: bool  # outputs are along the second axis of the weight: an embedding

    def sizes(self, layout: Layout) -> tuple[int, int]:
        """i, with 1 more for a bias, and o."""
        shape = layout.shapes[self.weight]
        if self.table:
            return shape[0], shape[1]
        return prod(shape[1:]) + (self.bias is not None), len(range(shape[0])[self.rows])

    def views(self, layout: Layout, flat: Tensor, outputs: int) -> tuple[Tensor, Tensor | None]:
        """The weights in `flat` [R, P] as a view [R, o, i], and the biases as a view [R, o, 1]. `outputs` is o: a head
        may have grown since.
        """
        weight = layout.view(flat, self.weight)[:, self.rows]
        weight = weight.mT if self.table else weight[:, :outputs].view(len(flat), outputs, -1)
        bias = None if self.bias is None else layout.view(flat, self.bias)[:, self.bias_rows]
        return weight, None if bias is None else bias[:, :outputs].unsqueeze(2)

    def matrix(self, layout: Layout, flat: Tensor, outputs: int) -> Tensor:
        """D in `flat` [R, P]."""
        weight, bias = self.views(layout, flat, outputs)
        return weight if bias is None else torch.cat([weight, bias], 2)

    def add(self, layout: Layout, flat: Tensor, change: Tensor) -> None:
        """Add `change`, a matrix such as D, to `flat` in place."""
        weight, bias = self.views(layout, flat, change.shape[1])
        weight += change[:, :, : weight.shape[2]]
        if bias is not None:
            bias += change[:, :, weight.shape[2] :]


class Root(NamedTuple):
    """The inverse of a product G (x) A is (L (x) R) (L (x) R)^T: L [R, o, o]; R [R, i, i], or [R, i] if diagonal."""

    left: Tensor
    right: Tensor

    @classmethod
    def of(cls, a: Tensor, g: Tensor) -> Root:
        """From A [R, 1, ...] and G [R, 1, o, o]."""
        return cls(inverse_root(g[:, 0]), a[:, 0].rsqrt() if a.dim() == 3 else inverse_root(a[:, 0]))

    def drawn(self, z: Tensor) -> Tensor:
        """L Z R^T for Z [R, o, i]."""
        z = self.left @ z
        return z * self.right.unsqueeze(1) if self.right.dim() == 2 else z @ self.right.mT

    def solved(self, d: Tensor) -> Tensor:
        """The inverse times D [R, o, i]."""
        d = self.left @ (self.left.mT @ d)
        return d * self.right.square().unsqueeze(1) if self.right.dim() == 2 else d @ self.right @ self.right.mT

    def marginals(self) -> Tensor:
        """[R, o, i]: the diagonal of the inverse."""
        left, right = self.left.square(), self.right.square()
        return left.sum(2, keepdim=True) * (right if right.dim() == 2 else right.sum(2)).unsqueeze(1)


def inverse_root(matrix: Tensor) -> Tensor:
    """L with L L^T = matrix^-1; NaN for a replica that has diverged."""
    lower = torch.linalg.cholesky_ex(matrix)[0]
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    root: Tensor = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False).mT
    return root


def times(a: Tensor, g: Tensor, d: Tensor) -> Tensor:
    """sum_k G_k D A_k, for D [R, o, i]."""
    gd = g @ d.unsqueeze(1)
    return (gd * a.unsqueeze(2) if a.dim() == 3 else gd @ a).sum(1)


def merged(old: Pair, new: Pair, how: str) -> Pair:
    """The factors [R, K, ...] of earlier tasks and of a new one; see the top of this file."""
    more = new[1].shape[-1] - old[1].shape[-1]  # a head may have grown
    (a, g), (b, h) = (old[0], F.pad(old[1], (0, more, 0, more))), new
    if how == "sum":
        return a + b, g + h
    if how == "pi":
        ratio = _trace(g) * _trace(b) / (_trace(h) * _trace(a)).clamp_min(TINY)
        pi = ratio.clamp(TINY, 1 / TINY).sqrt()
        return a + b / pi.view(-1, 1, *[1] * (a.dim() - 2)), g + pi.view(-1, 1, 1, 1) * h
    a, g = torch.cat([a, b], 1), torch.cat([g, h], 1)
    return _nearest(a, g) if how == "nearest" else (a, g)


def _nearest(a: Tensor, g: Tensor) -> Pair:
    """(sum_k u_k A_k) (x) (sum_k v_k G_k), nearest to sum_k A_k (x) G_k: the best v for u, the best u for v, and so on.

    Inner products of covariances are never negative, so neither are u and v: the product is a covariance again.
    """
    inner_a, inner_g = (x.flatten(2) @ x.flatten(2).mT for x in (a, g))
    u = torch.ones_like(inner_a[:, :, :1])
    for _ in range(ROUNDS):
        v = inner_a @ u / (u.mT @ inner_a @ u).clamp_min(TINY)
        u = inner_g @ v / (v.mT @ inner_g @ v).clamp_min(TINY)
    v = inner_a @ u / (u.mT @ inner_a @ u).clamp_min(TINY)
    return tuple((w.view(*w.shape[:2], *[1] * (x.dim() - 2)) * x).sum(1, keepdim=True) for w, x in ((u, a), (v, g)))  # type: ignore[return-value]


def _trace(factor: Tensor) -> Tensor:
    """[R, 1] of a factor [R, 1, ...]"""
    return (factor if factor.dim() == 3 else diagonal(factor)).sum(2)


def diagonal(factor: Tensor) -> Tensor:
    return factor.diagonal(dim1=-2, dim2=-1)
