"""EVCL whose past is carried partly by generated rows: see evcl.py and dgr.py.

The evidence of earlier tasks must count once. A share alpha (`replay_share`) of it is carried by generated rows, and
the rest by the posterior of the last round:

    L_t = mean NLL + alpha N_past / N_t (mean loss on generated rows)
          + beta/N_t KL(q_t || q_{t-1}^(1-alpha) p_0^alpha) + (1 - alpha) (elastic term + distillation)

With s_0 and m_0 the variance and mean of p_0, q_{t-1}^(1-alpha) p_0^alpha is the Gaussian with

    precision  p = 1/s_0 + (1-alpha) (1/s - 1/s_0),    mean  m_0 + (1-alpha) (mu - m_0) / (s p)

alpha = 1 is deep generative replay with Gaussian weights and the first prior; alpha = 0 is EVCL. As generated rows
carry the alpha share of the evidence, the next posterior has all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evcl._core.settings import Settings
from evcl.methods.composed import DISTILLED
from evcl.methods.dgr import DGR, REPLAY, labelled
from evcl.methods.distillation import protection, unlearned
from evcl.methods.elastic_memory import Memory as ElasticMemory
from evcl.methods.evcl_er import SHARE
from evcl.methods.generator import Memory as GeneratorMemory
from evcl.methods.generator import begun, retrained
from evcl.methods.kl import betas, first_precision, kl
from evcl.methods.kronecker import MEASURES
from evcl.methods.kronecker_posterior import diagonal_only
from evcl.methods.label_noise import tempering
from evcl.methods.memory import per_weight
from evcl.methods.method import Fit, Learned, Learning, Round
from evcl.nn import Gaussian


@dataclass(frozen=True)
class Memory:
    base: ElasticMemory
    past: GeneratorMemory
    first: Tensor = per_weight(start="prior")  # the first prior's means


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    base, beta, by = memory.base, tempering(s, round_), MEASURES[s.importance]
    replay = begun(memory.past, round_, s)
    past = protection(base.rows, round_, Settings({**s, "distill": (1 - s.replay_share) * s.distill}))
    rest = torch.zeros_like(round_.posterior.mean[:, :1]) + (1 - s.replay_share)
    past = past._replace(elastic=rest * past.elastic)
    to_prior = kl(base.prior, beta, base.beta, past, round_, s)
    first = Gaussian(memory.first, -0.5 * first_precision(round_, s).log().expand_as(memory.first))  # p_0
    to_prior = replace(to_prior, prior=tempered(to_prior.prior, first, rest), means=by.means(base, round_))
    losses = labelled(replay, memory.past, round_, s.label_temperature, s.replay_share)
    fitted = yield Fit(
        round_.tasks,
        terms=[to_prior, *by.penalty(base, s, round_, past.elastic)],
        losses=[*past.losses, *losses],
        trackers=by.trackers(),
    )
    after = yield from retrained(replay, memory.past, round_, s)
    fitted = unlearned(fitted, to_prior.prior, past, round_)
    past = past._replace(losses=[*past.losses, *losses])
    kept = by.remembered(base, fitted, round_, s, betas(beta, base.beta, past, round_, s))
    return Learned(fitted.q, Memory(kept, after, memory.first))


def tempered(q: Gaussian, first: Gaussian, left: Tensor) -> Gaussian:
    """q^left first^(1 - left), for the evidence that q has beyond the first prior."""
    assert q.log_std is not None
    own, start = q.precision(), first.precision()
    precision = start + left * (own - start).clamp_min(0)
    mean = first.mean + left * own / precision * (q.mean - first.mean)
    same = left == 1
    return Gaussian(torch.where(same, q.mean, mean), torch.where(same, q.log_std, -0.5 * precision.log()))


EVCL_DGR = diagonal_only(
    DISTILLED,
    name="evcl-dgr",
    summary="",
    only_classes="the labels of its generated rows are classes",
    learn=learn,
    memory=Memory,
    replays=True,
    settings={
        **REPLAY,
        "replay_share": replace(SHARE, default=0.5),
    },
    no_memory=DGR.no_memory,
    stages=DGR.stages,
)
