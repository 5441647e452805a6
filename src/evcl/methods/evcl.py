"""EVCL: VCL plus a Fisher-weighted elastic penalty on the means and variances.

L_t = mean NLL + beta/N_t KL(q_t || q_{t-1}) + lambda/2 sum_i F_i [(mu_i - mu*_i)^2 + (s2_i - s2*_i)^2]

The anchor (mu*, s2*) is the posterior at the end of the last task, which is also the prior q_{t-1}. With the default
`fisher_scale`, F = sum_k n_k F_k / N_t: the weight that Laplace's approximation gives the rows of earlier tasks
relative to those of the new one, so that lambda = 1 has a meaning.

This is the plain method, as in the paper. composed.py adds distillation, a softmax for each group of classes and each
domain (task_inference.py), and other measures of importance.
"""

from __future__ import annotations

from dataclasses import replace

from evcl._core.settings import ELASTIC, Settings
from evcl.methods import kronecker_posterior
from evcl.methods.elastic_memory import FISHER, Importance, Memory
from evcl.methods.kl import betas, kl
from evcl.methods.label_noise import tempering
from evcl.methods.method import ALONE, Fit, Learned, Learning, Method, Past, Round


def learn(memory: Memory, round_: Round, s: Settings, past: Past = ALONE, by: Importance = FISHER) -> Learning:
    beta = tempering(s, round_)
    if s.posterior == "kronecker":
        return (yield from kronecker_posterior.learn(memory, round_, s, beta, past))
    to_prior = replace(kl(memory.prior, beta, memory.beta, past, round_, s), means=by.means(memory, round_))
    terms = [to_prior, *by.penalty(memory, s, round_, past.elastic)]
    fitted = yield Fit(round_.tasks, terms=terms, losses=past.losses, trackers=by.trackers())
    return Learned(fitted.q, by.remembered(memory, fitted, round_, s, betas(beta, memory.beta, past, round_, s)))


EVCL = Method(
    name="evcl",
    bayesian=True,
    learn=learn,
    memory=Memory,
    structure=kronecker_posterior.structure,
    settled=kronecker_posterior.settled,
    settings={
        **ELASTIC,
        "posterior": kronecker_posterior.POSTERIOR,
        "strength": kronecker_posterior.STRENGTH,
        "importance": replace(ELASTIC["importance"], choices=("fisher",)),
        **kronecker_posterior.Kronecker().settings,
    },
    apart=True,
)
