"""A Gaussian whose precision, over the weights [W, b] of a layer, is a Kronecker product G (x) A, or a sum of them.

With D [o, i] a change of [W, b], the precision times D is sum_k G_k D A_k, and a draw from one product is
L_G Z L_A^T, with L_G L_G^T = G^-1, L_A L_A^T = A^-1 and Z standard normal. Of two products, one basis makes both
diagonal: so their sum, or difference, is solved exactly.

One product stands for the factors (A, G) of earlier evidence and (B, H) of new evidence:

    sum       A + B, G + H (Ritter et al., 2018): for tasks that are alike, this grows as the square of their number
    pi        A + B / pi, G + pi H, pi^2 = tr G tr B / (tr H tr A) (Kao et al., 2021): the same for any units of A and G
    nearest   the product that is nearest to A (x) G + B (x) H in the sum of squares: exact for tasks that are alike
    tasks     none: both are kept
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl._core.devices import double
from evcl._core.errors import EvclError
from evcl.posterior.gaussian import Gaussian
from evcl.posterior.layout import Layout

TINY = 1e-30
MAX_ITERATIONS = 50  # of the iteration for the nearest product
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
    """The inverse of one product, or of the sum of two, is (L (x) R) diag(1 / scale) (L (x) R)^T: L [R, o, o]; R
    [R, i, i], or [R, i] if it is diagonal; scale [R, o, i], or None if it is 1. Of a sum, L and R have eigenvectors U
    and V as factors (None: a diagonal R), which rounding may turn; draws do not depend on them.
    """

    left: Tensor
    right: Tensor
    scale: Tensor | None = None
    u: Tensor | None = None
    v: Tensor | None = None

    @classmethod
    def of(cls, a: Tensor, g: Tensor) -> Root:
        """From A [R, K, ...] and G [R, K, o, o], of which the first must be positive definite."""
        if a.shape[1] > 2:
            raise EvclError(f"a sum of {a.shape[1]} Kronecker products has no root: merge them into one")
        like, a, g = g, double(a), double(g)  # rounding, as of a GPU's products, would make small eigenvalues negative
        root = cls(inverse_root(g[:, 0]), a[:, 0].rsqrt() if a.dim() == 3 else inverse_root(a[:, 0]))
        if a.shape[1] == 2:
            of_g, u = _eigen(root.left.mT @ g[:, 1] @ root.left, like)
            if a.dim() == 3:
                of_a, v, right = a[:, 1] / a[:, 0], None, root.right
            else:
                of_a, v = _eigen(root.right.mT @ a[:, 1] @ root.right, like)
                right = root.right @ v
            root = cls(root.left @ u, right, 1 + of_g.unsqueeze(2) * of_a.unsqueeze(1), u, v)
        return cls(*(None if one is None else one.to(like) for one in root))  # type: ignore[arg-type]

    def drawn(self, z: Tensor) -> Tensor:
        """The matrix that standard normal numbers Z [R, o, i] stand for."""
        z = z if self.u is None else self.u.mT @ z
        return self._scaled(z if self.v is None else z @ self.v)

    def _scaled(self, z: Tensor) -> Tensor:
        """L Z R^T for Z [R, o, i], after a division by the root of the scale."""
        z = self.left @ (z if self.scale is None else z * self.scale.rsqrt())
        return z * self.right.unsqueeze(1) if self.right.dim() == 2 else z @ self.right.mT

    def solved(self, d: Tensor) -> Tensor:
        """The inverse times D [R, o, i]."""
        if self.scale is not None:
            d = self.left.mT @ d
            d = d * self.right.unsqueeze(1) if self.right.dim() == 2 else d @ self.right
            return self._scaled(d * self.scale.rsqrt())
        d = self.left @ (self.left.mT @ d)
        return d * self.right.square().unsqueeze(1) if self.right.dim() == 2 else d @ self.right @ self.right.mT

    def traced(self, h: Tensor, b: Tensor) -> Tensor:
        """[R]: the trace of the inverse times H (x) B."""
        left = (self.left * (h @ self.left)).sum(1)
        right = self.right.square() * b if self.right.dim() == 2 else (self.right * (b @ self.right)).sum(1)
        every = left.unsqueeze(2) * right.unsqueeze(1)
        trace: Tensor = (every if self.scale is None else every / self.scale).sum((1, 2))
        return trace

    def marginals(self) -> Tensor:
        """[R, o, i]: the diagonal of the inverse."""
        left, right = self.left.square(), self.right.square()
        if self.scale is None:
            return left.sum(2, keepdim=True) * (right if right.dim() == 2 else right.sum(2)).unsqueeze(1)
        scaled = left @ (1 / self.scale)
        return scaled * right.unsqueeze(1) if right.dim() == 2 else scaled @ right.mT

    def log_det(self) -> Tensor:
        """[R]: the log determinant of the product or sum, whose inverse this is."""
        o, i = self.left.shape[1], self.right.shape[1]
        right = self.right.abs().log().sum(1) if self.right.dim() == 2 else torch.linalg.slogdet(self.right)[1]
        log_det: Tensor = -2 * (i * torch.linalg.slogdet(self.left)[1] + o * right)
        return log_det if self.scale is None else log_det + self.scale.log().sum((1, 2))


def _eigen(matrix: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a symmetric matrix that was computed in the precision of `like`; an eigenvalue
    that may be a rounding error is 0.
    """
    values, vectors = torch.linalg.eigh(matrix)
    rounding = values.abs().amax(1, keepdim=True) * values.shape[1] * torch.finfo(like.dtype).eps
    return torch.where(values.abs() > rounding, values, 0.0), vectors


def inverse_root(matrix: Tensor) -> Tensor:
    """L with L L^T = matrix^-1; NaN for a replica that has diverged."""
    lower = torch.linalg.cholesky_ex(matrix)[0]
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    root: Tensor = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False).mT
    return root


@dataclass(frozen=True)
class KroneckerGaussian:
    """N(mean, L^-1): the precision L has Kronecker products for the blocks that have factors, and `rest` [R, P] for the
    other weights, where it is above 0. `mean` is [R, P].
    """

    mean: Tensor
    layout: Layout
    blocks: Mapping[str, Block]
    factors: Factors
    rest: Tensor
    known: dict[str, Root] = field(default_factory=dict, init=False, repr=False, compare=False)  # roots of the blocks

    def precision_times(self, v: Tensor) -> Tensor:
        """L v, for v [R, P]."""
        return self.mapped(self.rest * v, lambda key, d: times(*self.factors[key], d), v)

    def draw(self, z: Tensor) -> Tensor:
        """The weights that standard normal numbers z [R, P] stand for. A block whose numbers are all 0 needs no root:
        there may be thousands of heads.
        """

        def drawn(key: str, d: Tensor) -> Tensor:
            return self._root(key).drawn(d) if bool(d.any()) else d

        return self.mean + self.mapped(z * self._inverse(self.rest).sqrt(), drawn, z)

    def marginals(self) -> Gaussian:
        """The Gaussian of each weight alone."""
        roots = self.roots
        variance = self.mapped(self._inverse(self.rest), lambda key, d: roots[key].marginals(), self.rest)
        return Gaussian(self.mean, 0.5 * variance.log(), self.layout)

    def factored(self) -> Tensor:
        """[R, P]: 1 for weights with factors, otherwise 0."""
        return self.mapped(torch.zeros_like(self.mean), lambda key, d: torch.ones_like(d), self.mean)

    def precision(self) -> Tensor:
        """[R, P]: the diagonal of the precision."""
        return self.mapped(self.rest.clone(), lambda key, d: _diagonals(*self.factors[key]), self.mean)

    def views(self) -> dict[str, Gaussian]:
        """The marginals of the weights of each name, [R, *shape]."""
        return self.marginals().views()

    def kl(self, prior: KroneckerGaussian) -> Tensor:
        """[R]: KL(self || prior) = 1/2 [tr(L_0 L^-1) - P + d^T L_0 d + log |L| - log |L_0|], d the means apart."""
        away, ratio = self.mean - prior.mean, torch.where(self.rest > 0, prior.rest / self.rest, 1.0)
        total = (away * prior.precision_times(away)).sum(1) + (ratio - 1 - ratio.log()).sum(1)
        others = prior.roots
        for key, root in self.roots.items():
            traces = [root.traced(h, b) for b, h in zip(*(one.unbind(1) for one in prior.factors[key]), strict=True)]
            total = total + sum(traces) - root.left.shape[1] * root.right.shape[1]
            total = total + root.log_det() - others[key].log_det()
        return 0.5 * total

    def log_density(self, weights: Tensor) -> Tensor:
        """[R]: the log density of weights [R, P], in nats."""
        away, some = weights - self.mean, self.rest > 0
        log_det = torch.where(some, self.rest.clamp_min(TINY).log(), 0.0).sum(1)
        log_det = log_det + sum((root.log_det() for root in self.roots.values()), torch.zeros_like(log_det))
        count = some.sum(1) + self.factored().sum(1)
        return 0.5 * (log_det - (away * self.precision_times(away)).sum(1) - count * math.log(2 * math.pi))

    def plus(self, evidence: KroneckerGaussian, how: str = "nearest") -> KroneckerGaussian:
        """The posterior after more evidence. Its mean is that of the exact sum; the factors become one product as `how`
        says (see the top of this file).
        """
        factors = {key: merged(pair, evidence.factors[key], how) for key, pair in self.factors.items()}
        return replace(self._with(evidence, 1), factors=factors)

    def minus(self, evidence: KroneckerGaussian) -> KroneckerGaussian:
        """The posterior without this evidence, a difference of products; refused if that is no precision."""
        return self._with(evidence, -1)

    @cached_property
    def roots(self) -> dict[str, Root]:
        return {key: self._root(key) for key in self.factors}

    def _root(self, key: str) -> Root:
        if key not in self.known:
            self.known[key] = Root.of(*self.factors[key])
        return self.known[key]

    def _with(self, evidence: KroneckerGaussian, sign: int) -> KroneckerGaussian:
        both = {}
        for key, pair in self.factors.items():
            b, h = evidence.factors[key]
            both[key] = merged(pair, (b, sign * h), "tasks")
        whole = replace(self, factors=both, rest=self.rest + sign * evidence.rest)
        roots = whole.roots
        least = {key: float(root.scale.min()) for key, root in roots.items() if root.scale is not None}
        if bool((self.rest > 0).any()):
            least["weights without factors"] = float((whole.rest / self.rest)[self.rest > 0].min())
        for key, value in least.items():
            if not value > 0:
                what = f"relative to what it is, the precision of {key!r} would have the eigenvalue {value:.3g}"
                raise EvclError(f"{what}: this evidence is not in there")
        pull = sign * evidence.precision_times(evidence.mean - self.mean)
        moved = whole.mapped(pull * self._inverse(whole.rest), lambda key, d: roots[key].solved(d), pull)
        return replace(whole, mean=self.mean + moved)

    def mapped(self, found: Tensor, change: Callable[[str, Tensor], Tensor], flat: Tensor) -> Tensor:
        """`found` [R, P] plus, for each block, its D in `flat` changed."""
        for key, (_, g) in self.factors.items():
            block = self.blocks[key]
            block.add(self.layout, found, change(key, block.matrix(self.layout, flat, g.shape[-1])))
        return found

    @staticmethod
    def _inverse(rest: Tensor) -> Tensor:
        return torch.where(rest > 0, 1 / rest, 0.0)


def _diagonals(a: Tensor, g: Tensor) -> Tensor:
    """[R, o, i]: the diagonal of sum_k G_k (x) A_k."""
    return diagonal(g).mT @ (a if a.dim() == 3 else diagonal(a))


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
    for _ in range(MAX_ITERATIONS):
        v = inner_a @ u / (u.mT @ inner_a @ u).clamp_min(TINY)
        u = inner_g @ v / (v.mT @ inner_g @ v).clamp_min(TINY)
    v = inner_a @ u / (u.mT @ inner_a @ u).clamp_min(TINY)
    return tuple((w.view(*w.shape[:2], *[1] * (x.dim() - 2)) * x).sum(1, keepdim=True) for w, x in ((u, a), (v, g)))  # type: ignore[return-value]


def _trace(factor: Tensor) -> Tensor:
    """[R, 1] of a factor [R, 1, ...]"""
    return (factor if factor.dim() == 3 else diagonal(factor)).sum(2)


def diagonal(factor: Tensor) -> Tensor:
    return factor.diagonal(dim1=-2, dim2=-1)
