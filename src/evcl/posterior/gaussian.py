"""Gaussians over the weights: one with a variance of its own for each weight, or point weights, which have none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl.posterior.layout import Layout


class Evidence(NamedTuple):
    """What rows say about the weights: exp(-1/2 sum_p precision_p (w_p - centre_p)^2 + pull_p (w_p - centre_p)).

    It is about a centre, the mean of the posterior that the rows were added to: differences from it stay exact where
    the rows said nothing.
    """

    precision: Tensor
    pull: Tensor
    centre: Tensor

    def __add__(self, other: object) -> Evidence:
        """The evidence of both; the other's must be about the same centre."""
        assert isinstance(other, Evidence)
        return Evidence(self.precision + other.precision, self.pull + other.pull, self.centre)


@dataclass
class Gaussian:
    """N(mean, exp(log_std)^2) over every weight, both [R, P]; point weights at `mean` if log_std is None.

    `layout`, if known, names the parts of P.
    """

    mean: Tensor
    log_std: Tensor | None
    layout: Layout | None = field(default=None, compare=False, repr=False)

    def part(self, name: str) -> Tensor:
        """The means of the weights of this name: a view [R, *shape]."""
        if self.layout is None:
            raise ValueError("these weights have no layout")
        return self.layout.view(self.mean, name)

    def map(self, change: Callable[[Tensor], Tensor], layout: Layout | None = None) -> Gaussian:
        """Apply `change` to the means and to the log standard deviations."""
        return Gaussian(change(self.mean), None if self.log_std is None else change(self.log_std), layout)

    def snapshot(self) -> Gaussian:
        """A copy that later training does not change."""
        log_std = None if self.log_std is None else self.log_std.detach().clone()
        return Gaussian(self.mean.detach().clone(), log_std)

    def variance(self) -> Tensor | None:
        return None if self.log_std is None else (2 * self.log_std).exp()

    def std(self) -> Tensor:
        return _log_std(self, "standard deviations").exp()

    def precision(self) -> Tensor:
        return (-2 * _log_std(self, "precision")).exp()

    def draw(self, z: Tensor) -> Tensor:
        """The weights that standard normal numbers z [R, P] stand for."""
        return self.mean + self.std() * z

    def precision_times(self, v: Tensor) -> Tensor:
        """The precision times a vector [R, P]."""
        return self.precision() * v

    def kl(self, prior: Gaussian) -> Tensor:
        """[R]: KL(self || prior), summed over the weights."""
        return self.divergence(prior).sum(1)

    def divergence(self, prior: Gaussian) -> Tensor:
        """[R, P]: KL(self || prior) of each weight.

        KL = log(s0/s) + (s^2 + (m - m0)^2) / (2 s0^2) - 1/2,   self = N(m, s^2), prior = N(m0, s0^2)
        """
        own, first = (_log_std(q, "KL divergence") for q in (self, prior))
        difference = (self.mean - prior.mean).square() + (2 * own).exp()
        return first - own + 0.5 * difference * (-2 * first).exp() - 0.5

    def since(self, before: Gaussian) -> Evidence:
        """The evidence that has made `before` into this posterior. Rows add precision: less than before counts as none
        for a weight.
        """
        first = before.precision()
        own = torch.maximum(self.precision(), first)
        return Evidence(own - first, own * (self.mean - before.mean), before.mean)

    def plus(self, evidence: Evidence) -> Gaussian:
        """The posterior after this evidence: precisions add up."""
        return self._with(evidence, 1)

    def minus(self, evidence: Evidence) -> Gaussian:
        """The posterior without this evidence; refused if it does not have as much."""
        return self._with(evidence, -1)

    def _with(self, evidence: Evidence, sign: int) -> Gaussian:
        precision = self.precision() + sign * evidence.precision
        if not bool((precision > 0).all()):
            r, p = (int(i[0]) for i in torch.nonzero(precision <= 0, as_tuple=True))
            names = [] if self.layout is None else [n for n, s in self.layout.spans.items() if s.start <= p < s.stop]
            value, where = float(precision[r, p]), f" of {names[0]!r}" if names else ""
            raise EvclError(f"the precision of weight {p}{where} would be {value:g}: its evidence is not in there")
        pull = evidence.pull - evidence.precision * (self.mean - evidence.centre)
        return Gaussian(self.mean + sign * pull / precision, -0.5 * precision.log(), self.layout)

    def views(self) -> dict[str, Gaussian]:
        """The weights of each name, [R, *shape]: views, not copies."""
        if self.layout is None:
            raise ValueError("these weights have no layout")
        means = self.layout.views(self.mean)
        stds = dict.fromkeys(means) if self.log_std is None else self.layout.views(self.log_std)
        return {name: Gaussian(mean, stds[name]) for name, mean in means.items()}


def _log_std(q: Gaussian, what: str) -> Tensor:
    if q.log_std is None:
        raise EvclError(f"point weights have no {what}: use a Bayesian method, such as evcl or vcl")
    return q.log_std
