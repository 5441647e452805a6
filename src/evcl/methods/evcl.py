"""EVCL: VCL plus a Fisher-weighted elastic penalty on the means and variances, and a distillation loss on the outputs.

L_t = mean NLL + beta/N_t KL(q_t || q_{t-1}) + lambda/2 sum_i F_i [(mu_i - mu*_i)^2 + (s2_i - s2*_i)^2] + distillation

The anchor (mu*, s2*) is the posterior at the end of the last task, which is also the prior q_{t-1}. With the default
`fisher_scale`, F = sum_k n_k T^2 F_k / N_t: the weight that Laplace's approximation gives the rows of earlier tasks
relative to those of the new one, so that lambda = 1 has a meaning. `importance` chooses another measure in place of the
Fisher (see importance.py). The last term is in `teacher.py`; the paper does not
have it (`distill` 0).
"""

from __future__ import annotations

from dataclasses import replace

from evcl._core.settings import ELASTIC, Settings
from evcl._core.summaries import METHOD_SUMMARIES
from evcl.methods.doubt import tempering
from evcl.methods.ewc import Memory, elastic
from evcl.methods.importance import IMPORTANCE
from evcl.methods.method import Fit, Learned, Learning, Method, Round
from evcl.methods.teacher import DISTILLATION, USUAL, held, unlearned
from evcl.methods.terms import Term
from evcl.methods.vcl import betas, kl


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    past, beta, importance = held(memory.rows, round_, s), tempering(s, round_), IMPORTANCE[s.importance]
    to_prior = kl(memory.prior, beta, memory.beta, past, round_, s)
    terms: list[Term] = [to_prior, elastic(memory, s, round_.n, past.elastic)]
    fitted = yield Fit(round_.tasks, terms=terms, losses=past.lessons, trackers=importance.trackers())
    found = importance.measure(fitted, round_, s)
    fitted = unlearned(fitted, to_prior.prior, past, round_)
    return Learned(
        fitted.q, memory.after(fitted, round_, found, s.fisher_decay, betas(beta, memory.beta, past, round_, s))
    )


EVCL = Method(
    name="evcl",
    summary=METHOD_SUMMARIES["evcl"],
    bayesian=True,
    learn=learn,
    memory=Memory,
    settings={
        **ELASTIC,
        **DISTILLATION,
        "distill": replace(DISTILLATION["distill"], default=USUAL),
    },
    apart=True,
)
