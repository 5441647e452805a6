"""The posterior of a layer in noisy K-FAC: a matrix normal, from Kronecker factors of the Fisher.

    A_d = A / pi + c I,   G_d = pi G + c I,   pi^2 = mean diag A / mean diag G

G_d (x) A_d, whose inverse is N/beta times the covariance, stands for G (x) A + c^2 I. It is larger than this sum, by
c (pi G (x) I + I (x) A / pi). The excess protects weights of inactive units, whose rows in A and G are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evcl.curvature import Block
from evcl.methods.kronecker import TINY, Pair, diagonal, merged
from evcl.nn import Layout


def shapes(block: Block, layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of A and G, without the replica axis."""
    i, o = block.sizes(layout)
    return (i,) if block.table else (i, i), (o, o)


def damped(a: Tensor, g: Tensor, prior: Tensor) -> Pair:
    """A_d and G_d from A, G and c^2 = `prior` [R, 1, 1, 1]; all factors are [R, 1, ...]."""
    inner = a if a.dim() == 3 else diagonal(a)
    ratio = inner.mean(2) / diagonal(g).mean(2).clamp_min(TINY)
    pi, c = ratio.clamp(TINY, 1 / TINY).sqrt().view(-1, 1, 1, 1), prior.sqrt()
    eye_g = torch.eye(g.shape[-1], dtype=g.dtype, device=g.device)
    if a.dim() == 3:
        return a / pi[..., 0] + c[..., 0], pi * g + c * eye_g
    return a / pi + c * torch.eye(a.shape[-1], dtype=a.dtype, device=a.device), pi * g + c * eye_g


class LayerPosterior:
    """The factors of one block, and the square roots of its covariance over D [R, o, i], as beta/N times a product."""

    def __init__(self, block: Block, layout: Layout, like: Tensor, old: Pair | None, prior: Tensor) -> None:
        """`old`: the factors of earlier tasks, divided by N; `prior`: c^2 [R, 1, 1, 1]."""
        self.block, self.layout, self.old, self.prior = block, layout, old, prior
        self.a, self.g = (like.new_zeros(len(like), *shape) for shape in shapes(block, layout))
        self.batch = self.a.clone(), self.g.clone()  # of the last batch; a and g are running means
        self.right, self.left = self.a.clone(), self.g.clone()  # L_A, L_G

    def refresh(self) -> None:
        """Compute the square roots from the factors."""
        pair = self.a.unsqueeze(1), self.g.unsqueeze(1)
        a, g = damped(*(pair if self.old is None else merged(self.old, pair, "nearest")), self.prior)
        self.right.copy_(a[:, 0].rsqrt() if self.block.table else inverse_root(a[:, 0]))
        self.left.copy_(inverse_root(g[:, 0]))

    def drawn(self, z: Tensor) -> Tensor:
        """L_G Z L_A^T, Z the block's part of z [R, P]."""
        z = self.left @ self.block.matrix(self.layout, z, self.left.shape[1])
        return z * self.right.unsqueeze(1) if self.block.table else z @ self.right.mT

    def solved(self, d: Tensor) -> Tensor:
        """G_d^-1 D A_d^-1, D the block's part of d [R, P]."""
        d = self.left @ (self.left.mT @ self.block.matrix(self.layout, d, self.left.shape[1]))
        return d * self.right.square().unsqueeze(1) if self.block.table else d @ self.right @ self.right.mT

    def marginals(self) -> Tensor:
        """[R, o, i]: (G_d^-1)_oo (A_d^-1)_ii"""
        right = self.right.square() if self.block.table else self.right.square().sum(2)
        return self.left.square().sum(2, keepdim=True) * right.unsqueeze(1)

    def buffers(self) -> list[Tensor]:
        return [self.a, self.g, self.left, self.right]


def inverse_root(matrix: Tensor) -> Tensor:
    """L with L L^T = matrix^-1; NaN for a replica that has diverged."""
    lower = torch.linalg.cholesky_ex(matrix)[0]
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    root: Tensor = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False).mT
    return root
