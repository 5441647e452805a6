"""Variational continual learning (Nguyen et al., 2018): the posterior of one task is the prior of the next.

L_t = mean NLL + beta/N_t KL(q_t || q_{t-1})

`distill` adds a pull on what the network says, see teacher.py; plain VCL has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from evcl.methods.memory import per_task, per_weight
from evcl.methods.method import Fit, Learned, Learning, Method, Round
from evcl.methods.teacher import DISTILLATION, Number, Past, held, more_rows
from evcl.methods.terms import KL
from evcl.nn import Gaussian, log_stds
from evcl.settings import Settings

BETAS = (0.003, 0.03)  # the least and the largest that tempering auto gives


@dataclass(frozen=True)
class Memory:
    prior: Gaussian = per_weight(Gaussian, "prior")  # q_{t-1}
    rows: dict[int, Tensor] = per_task()  # head -> [R, 1]: how many it has learned


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    past = held(memory.rows, round_, s)
    fitted = yield Fit(round_.tasks, terms=[kl(memory.prior, memory.rows, past, round_, s)], losses=past.lessons)
    return Learned(fitted.q, Memory(fitted.q, more_rows(memory.rows, round_)))


def tempering(s: Settings, rows: Number) -> Number:
    """beta for a posterior of this many rows, those of all rounds so far.

    auto: 2e-6 times the rows, from 0.003 to 0.03. The more rows there are, the better they bear a wide posterior, which
    keeps a network from learning the noise of its labels by heart.
    """
    beta: Number
    if not isinstance(s.tempering, str):
        beta = s.tempering
        return beta
    beta = 2e-6 * rows
    return beta.clamp(*BETAS) if isinstance(beta, Tensor) else min(max(beta, BETAS[0]), BETAS[1])


def kl(prior: Gaussian, rows: Mapping[int, Tensor], past: Past, round_: Round, s: Settings) -> KL:
    """beta / n times the KL to the last posterior, or to a wider one.

    What rows have added to the precision of the first prior was measured in units of the last round's beta, and counts
    in those of this one's. Where the weights let go of a part of the past, as much of it goes.
    """
    beta = tempering(s, _total(more_rows(rows, round_)))
    cooler = tempering(s, _total(rows)) / beta if isinstance(s.tempering, str) and rows else 1.0
    share = past.prior * cooler
    if isinstance(share, Tensor) and prior.log_std is not None:
        first = (-2 * log_stds(s.prior_std, round_.network.scales, round_.network.layout, prior.mean)).exp()
        precision = first + share * ((-2 * prior.log_std).exp() - first).clamp_min(0)
        prior = Gaussian(prior.mean, torch.where(share == 1, prior.log_std, -0.5 * precision.log()))
    return KL(prior, beta / round_.n)


def _total(rows: Mapping[int, Tensor]) -> Tensor:
    return torch.stack(list(rows.values())).sum(0)


VCL = Method(
    name="vcl",
    summary="a Gaussian over each weight, carried on as the next prior",
    bayesian=True,
    learn=learn,
    memory=Memory,
    settings=DISTILLATION,
)
