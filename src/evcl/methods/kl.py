"""The KL to the last posterior, in units of this round's beta."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from evcl._core.settings import Settings
from evcl.methods.memory import TRUNK_KEY
from evcl.methods.method import Past, Round
from evcl.methods.terms import Number, Spring, Springs
from evcl.nn import Gaussian
from evcl.nn.slots import head_names


@dataclass(frozen=True)
class KL:
    """weight * KL(q || prior); weight = beta / N. `means` [R, P] is a factor on its part (mu - mu*)^2 / (2 s2*)."""

    prior: Gaussian
    weight: Tensor | float
    means: Tensor | None = None
    name: ClassVar[str] = "kl"

    def loss(self, q: Gaussian) -> Tensor:
        weight = self.weight.reshape(-1) if isinstance(self.weight, Tensor) else self.weight
        whole, variance = q.kl(self.prior), self.prior.variance()
        if self.means is not None and variance is not None:
            whole = whole - 0.5 * ((1 - self.means) * (q.mean - self.prior.mean).square() / variance).sum(1)
        return weight * whole

    def springs(self) -> Springs:
        """a = k = weight / s; the centres are the prior's means and variances."""
        variance = self.prior.variance()
        assert variance is not None
        precision = self.weight / variance
        pull = precision if self.means is None else self.means * precision
        return Springs(Spring(pull, self.prior.mean), Spring(precision, variance))


def kl(prior: Gaussian, beta: Number, before: Mapping[int, Tensor], past: Past, round_: Round, s: Settings) -> KL:
    """beta / n times the KL to the last posterior, or to a wider version of it.

    The precision that earlier rows added to the first prior is in units of an earlier round's beta; `before` holds that
    beta for each head and for the trunk. It is converted to units of this round's beta. If `past.prior` is below 1,
    only that fraction of the added precision is kept.
    """
    share = past.prior
    if before and isinstance(s.tempering, str):
        share = share * _converted(beta, before, past, round_)
    return KL(widened(prior, share, round_, s), beta / round_.n)


def widened(prior: Gaussian, share: Number, round_: Round, s: Settings) -> Gaussian:
    """`prior` with this share of the precision that it has beyond the first prior's; a number is 1, and changes
    nothing.
    """
    if not isinstance(share, Tensor) or prior.log_std is None:
        return prior
    first = first_precision(round_, s)
    precision = first + share * (prior.precision() - first).clamp_min(0)
    return Gaussian(prior.mean, torch.where(share == 1, prior.log_std, -0.5 * precision.log()))


def first_precision(round_: Round, s: Settings) -> Tensor:
    """[1, P] or [R, 1]: the precision of the first prior."""
    return (-2 * round_.network.first_log_std(s.prior_std, round_.posterior.mean)).exp()


def _converted(beta: Number, before: Mapping[int, Tensor], past: Past, round_: Round) -> Tensor:
    """[R, P]: the beta a weight was last trained with, divided by this round's; 1 for weights not trained now."""
    network = round_.network
    ratio = torch.ones_like(round_.posterior.mean)
    heads = {name: k for k in used_heads(past, round_) for name in head_names(k).values()}
    for name, k in {**dict.fromkeys(network.trunk_names, TRUNK_KEY), **heads}.items():
        if k in before and name in network.layout.spans:  # a trunk with its own classifier has no heads
            ratio[:, network.layout.spans[name]] = before[k] / beta
    return ratio


def used_heads(past: Past, round_: Round) -> list[int]:
    """The heads that a round trains: those of its tasks and those that are distilled."""
    return list(dict.fromkeys([*(task.head for task in round_.tasks), *(k for one in past.losses for k in one.heads)]))


def betas(beta: Number, before: Mapping[int, Tensor], past: Past, round_: Round, s: Settings) -> dict[int, Tensor]:
    """`before` updated with this round: the beta that each head and the trunk were last trained with. Only the heads of
    a round with `tempering` auto are recorded.
    """
    mean = round_.posterior.mean
    heads = [TRUNK_KEY, *used_heads(past, round_)] if isinstance(s.tempering, str) else []
    return {**before, **{k: mean.new_zeros(len(mean), 1) + beta for k in heads}}
