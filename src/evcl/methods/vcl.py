"""Variational continual learning (Nguyen et al., 2018): the posterior of one task is the prior of the next.

L_t = mean NLL + beta/N_t KL(q_t || q_{t-1})
"""

from __future__ import annotations

from dataclasses import dataclass

from evcl.methods.memory import per_weight
from evcl.methods.method import Fit, Learned, Learning, Method, Round
from evcl.methods.terms import KL
from evcl.nn import Gaussian
from evcl.settings import Settings


@dataclass(frozen=True)
class Memory:
    prior: Gaussian = per_weight(Gaussian, "prior")  # q_{t-1}


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    fitted = yield Fit(round_.tasks, terms=[KL(memory.prior, s.tempering / round_.n)])
    return Learned(fitted.q, Memory(fitted.q))


VCL = Method(
    name="vcl",
    summary="a Gaussian over each weight, carried on as the next prior",
    bayesian=True,
    learn=learn,
    memory=Memory,
)
