"""EVCL with a Kronecker-factored Fisher: the elastic term on the means of a layer is a matrix penalty.

L_t = mean NLL + beta/N_t KL(q_t || q_{t-1}) + distillation
      + lambda/2 sum_l { tr(D_l^T G_l D_l A_l) + sum_oi G_oo A_ii (s2_oi - s2*_oi)^2 },   D_l = M_l - M*_l

M_l are the means of [W_l, b_l]. The factors and their merging are in kronecker.py. EVCL's `fisher_spread` is, to first
order, a damping of the factors, read on the diagonal of their product; here it is that damping. All else is as in
evcl.py, with one exception. The precision of q_{t-1} is a diagonal estimate of the same curvature that the factors
estimate, so that with both pulls the past would count twice, and the diagonal would hold directions that the factors
leave free. `kl_means`, 0 by default, is a factor on the part (mu - mu*)^2 / (2 s2*) of the KL for weights with factors.
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
            "factor on the KL's pull on the means of weights that have Kronecker factors: 1 is EVCL's; 0 leaves these "
            "means to the matrix penalty, so that the past counts only once",
            high=1.0,
        ),
        "distill": replace(DISTILLATION["distill"], default=USUAL),
    },
    apart=True,
)
