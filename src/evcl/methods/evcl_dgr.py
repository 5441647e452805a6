"""EVCL whose past is carried partly by generated rows: see evcl.py and dgr.py.

The evidence of earlier tasks must count once. A share alpha (`replayed`) of it is carried by generated rows, and the
rest by the posterior of the last round:

    L_t = mean NLL + alpha N_past / N_t (mean loss on generated rows)
          + beta/N_t KL(q_t || q_{t-1}^(1-alpha) p_0^alpha) + (1 - alpha) (elastic term + distillation)

q_{t-1}^(1-alpha) p_0^alpha has, of the precision that earlier rows added to the first prior p_0, the fraction 1 -
alpha; its mean stays that of q_{t-1}. alpha = 1 is deep generative replay with Gaussian weights and the first prior's
precision; alpha = 0 is EVCL. As generated rows carry the alpha share of the evidence, the next posterior has all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from evcl._core.settings import Setting, Settings
from evcl._core.summaries import METHOD_SUMMARIES
from evcl.methods.dgr import DGR, REPLAY, labelled
from evcl.methods.elastic_memory import Memory as ElasticMemory
from evcl.methods.evcl import EVCL
from evcl.methods.generator import Memory as GeneratorMemory
from evcl.methods.generator import begun, retrained
from evcl.methods.importance import trackers
from evcl.methods.kronecker import factored, penalty, remembered
from evcl.methods.label_noise import tempering
from evcl.methods.method import Fit, Learned, Learning, Round
from evcl.methods.teacher import protection, unlearned
from evcl.methods.vcl import betas, kl


@dataclass(frozen=True)
class Memory:
    base: ElasticMemory
    past: GeneratorMemory


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    base, beta = memory.base, tempering(s, round_)
    replay = begun(memory.past, round_, s)
    past = protection(base.rows, round_, Settings({**s, "distill": (1 - s.replayed) * s.distill}))
    rest = torch.zeros_like(round_.posterior.mean[:, :1]) + (1 - s.replayed)
    past = past._replace(prior=rest * past.prior, elastic=rest * past.elastic)
    to_prior = kl(base.prior, beta, base.beta, past, round_, s)
    if base.factors:
        to_prior = replace(to_prior, means=1 - factored(base, round_))
    losses = labelled(replay, memory.past, round_, s.label_temperature, s.replayed)
    fitted = yield Fit(
        round_.tasks,
        terms=[to_prior, *penalty(base, s, round_, past.elastic)],
        losses=[*past.losses, *losses],
        trackers=trackers(s),
    )
    after = yield from retrained(replay, memory.past, round_, s)
    fitted = unlearned(fitted, to_prior.prior, past, round_)
    past = past._replace(losses=[*past.losses, *losses])
    kept = remembered(base, fitted, round_, s, betas(beta, base.beta, past, round_, s))
    return Learned(fitted.q, Memory(kept, after))


EVCL_DGR = replace(
    EVCL,
    name="evcl-dgr",
    summary=METHOD_SUMMARIES["evcl-dgr"],
    learn=learn,
    memory=Memory,
    settings={
        **EVCL.settings,
        **REPLAY,
        "replayed": Setting(
            0.5, "alpha, the share of the past that generated rows carry; the posterior carries the rest", high=1.0
        ),
    },
    stages=DGR.stages,
    shares="evcl-dgr",
)
