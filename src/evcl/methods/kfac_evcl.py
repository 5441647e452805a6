"""EVCL with a Kronecker-factored Fisher: the elastic term on the means of a layer is a matrix penalty.

L_t = mean NLL + beta/N_t KL(q_t || q_{t-1}) + distillation
      + lambda/2 sum_l { tr(D_l^T G_l D_l A_l) + sum_oi G_oo A_ii (s2_oi - s2*_oi)^2 },   D_l = M_l - M*_l

M_l are the means of [W_l, b_l]. The factors and their merging are in kronecker.py; all else is as in evcl.py. EVCL's
`fisher_spread` is, to first order, a damping of the factors, read on the diagonal of their product; here it is that
damping.
"""

from __future__ import annotations

from dataclasses import replace

from evcl._core.settings import ELASTIC, Setting, Settings
from evcl._core.summaries import METHOD_SUMMARIES
from evcl.methods.doubt import tempering
from evcl.methods.kronecker import MERGE, Memory, at_most_one, factored, measured, penalty
from evcl.methods.method import Fit, Learned, Learning, Method, Round
from evcl.methods.teacher import DISTILLATION, USUAL, held
from evcl.methods.vcl import betas, kl


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    past, beta = held(memory.rows, round_, s), tempering(s, round_)
    to_prior = kl(memory.prior, beta, memory.beta, past, round_, s)
    to_prior = replace(to_prior, means=1 - (1 - s.kl_means) * factored(memory, round_))
    terms = [to_prior, *penalty(memory, s, round_, at_most_one(past.elastic))]
    fitted = yield Fit(round_.tasks, terms=terms, losses=past.lessons)
    factors, rest = measured(memory, fitted, round_, s)
    known = betas(beta, memory.beta, past, round_, s)
    return Learned(fitted.q, replace(memory, factors=factors).after(fitted, round_, rest, s.fisher_decay, known))


KFAC_EVCL = Method(
    name="kfac-evcl",
    summary=METHOD_SUMMARIES["kfac-evcl"],
    bayesian=True,
    learn=learn,
    memory=Memory,
    settings={
        **ELASTIC,
        **DISTILLATION,
        "strength": replace(ELASTIC["strength"], default=1.0),  # Laplace's
        "merge": MERGE,
        "kl_means": Setting(
            0.0,
            "factor on the KL's pull on the means of weights with Kronecker factors: 1 as in EVCL; 0 leaves them to the "
            "matrix penalty, so that the past counts only once",
            high=1.0,
        ),
        "distill": replace(DISTILLATION["distill"], default=USUAL),
    },
    apart=True,
)
