"""Gaussian classes with one covariance, on features that do not change: their posterior is exact.

A row of class c has features f ~ N(m_c, S). After n_c rows with mean f_c, and from a flat prior,

    m_c ~ N(f_c, S / n_c),    S = (scatter + k s I) / (n + k),    scatter = sum over rows of (f - f_c) (f - f_c)^T

with n = sum_c n_c and s = tr(scatter) / (D n): k pseudo-rows shrink S towards a multiple of the identity. Rows that
join or leave change counts, means and scatter in closed form, so that evidence is added and taken away without error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl.posterior.gaussian import Gaussian

FLOAT32_ERROR = 1e-5  # relative error of sums kept in float32, up to which a difference of them counts as 0


@dataclass(frozen=True)
class ClassMeans:
    """The posterior of the means of C classes of features [D], and, as evidence, what rows say about them.

    Attributes:
        count: [R, C], the number of rows of each class
        mean: [R, C, D], the mean of their features
        scatter: [R, D, D], summed over all rows, each about the mean of its class
        pseudo: k, the number of pseudo-rows
    """

    count: Tensor
    mean: Tensor
    scatter: Tensor
    pseudo: float

    @cached_property
    def root(self) -> Tensor:
        """[R, D, D]: the Cholesky factor of S."""
        n, k = self.count.sum(1), self.pseudo
        diagonal = self.scatter.diagonal(dim1=1, dim2=2)
        spread = (diagonal.mean(1) / n).clamp_min(1e-12)
        shrunk = self.scatter + torch.diag_embed((k * spread).unsqueeze(1).expand_as(diagonal))
        root: Tensor
        root, failed = torch.linalg.cholesky_ex(shrunk / (n + k).view(-1, 1, 1))
        if bool(failed.any()):
            what = "the inputs of some examples are too large beside the others to learn a likelihood per class"
            raise EvclError(f"{what}: scale them, or leave these examples out")
        return root

    def solved(self, v: Tensor) -> Tensor:
        """S^-1 v_c for each class, v [R, C, D]."""
        return torch.cholesky_solve(v.mT, self.root).mT

    def precision_times(self, v: Tensor) -> Tensor:
        """n_c S^-1 v_c for each class, v [R, C, D]."""
        return self.count.unsqueeze(2) * self.solved(v)

    def draw(self, z: Tensor) -> Tensor:
        """The means that standard normal numbers z [R, C, D] stand for."""
        return self.mean + z @ self.root.mT / self.count.sqrt().unsqueeze(2)

    def kl(self, prior: ClassMeans) -> Tensor:
        """[R]: KL(self || prior), summed over the classes.

        2 KL_c = tr(n0 S0^-1 S / n) - D + n0 d^T S0^-1 d + log |S0| - log |S| + D log(n / n0),   d the means apart
        """
        ratio, away = prior.count / self.count, self.mean - prior.mean
        traces = torch.cholesky_solve(self.root, prior.root).mul(self.root).sum((1, 2)).unsqueeze(1)
        log_dets = [2 * one.root.diagonal(dim1=1, dim2=2).log().sum(1, keepdim=True) for one in (prior, self)]
        pulled = (away * prior.precision_times(away)).sum(2)
        d = self.mean.shape[2]
        return 0.5 * (ratio * traces - d + pulled + log_dets[0] - log_dets[1] - d * ratio.log()).sum(1)

    def views(self) -> dict[str, Gaussian]:
        """The marginals of the class means."""
        variance = self.root.square().sum(2).unsqueeze(1) / self.count.unsqueeze(2)
        return {"mean": Gaussian(self.mean, 0.5 * variance.log())}

    def plus(self, rows: ClassMeans) -> ClassMeans:
        """The posterior after more rows."""
        return self._with(rows, 1)

    def minus(self, rows: ClassMeans) -> ClassMeans:
        """The posterior without these rows; refused if they are not in there."""
        return self._with(rows, -1)

    def _with(self, rows: ClassMeans, sign: int) -> ClassMeans:
        """With b rows of mean g:

        n' = n + sign b,  f' = f + sign b / n' (g - f),  scatter' = scatter + sign (rows' + n b / n' (g - f) (g - f)^T)
        """
        n, b, away = self.count, rows.count, rows.mean - self.mean
        after = n + sign * b
        after = torch.where(after.abs() <= FLOAT32_ERROR * torch.maximum(n, b), 0.0, after)
        if float(after.min()) < 0:
            r, c = (int(i[0]) for i in torch.nonzero(after < 0, as_tuple=True))
            raise EvclError(f"class {c} would have {float(after[r, c]):g} rows: this evidence is not in there")
        share = torch.where(after > 0, b / after.clamp_min(1e-12), 0.0).unsqueeze(2)
        mean = torch.where(after.unsqueeze(2) > 0, self.mean + sign * share * away, 0.0)
        between = (n.unsqueeze(2) * share * away).mT @ away
        scatter = self.scatter + sign * (rows.scatter + between)
        if sign < 0:
            least = torch.linalg.eigvalsh(scatter)[:, 0]
            if bool((least < -FLOAT32_ERROR * self.scatter.diagonal(dim1=1, dim2=2).sum(1)).any()):
                what = f"the scatter of its features would have the eigenvalue {float(least.min()):.3g}"
                raise EvclError(f"{what}: this evidence is not in there")
        return replace(self, count=after, mean=mean, scatter=scatter)
