"""Variational continual learning (Nguyen et al., 2018): the last posterior is the next prior.

L_t = mean NLL + beta/N_t KL(q_t || q_{t-1})
"""

from __future__ import annotations

from evcl.methods.method import Memory, Method
from evcl.methods.terms import KL, Term
from evcl.settings import Settings


def terms(memory: Memory, s: Settings, n: int) -> list[Term]:
    return [KL(memory.prior, s.tempering / n)]


VCL = Method(
    name="vcl",
    summary="a Gaussian over each weight, carried on as the next prior",
    bayesian=True,
    terms=terms,
)
