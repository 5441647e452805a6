"""EVCL: VCL plus an elastic, Fisher-weighted pull on the means and variances.

L_t = mean NLL + beta/N_t KL(q_t || q_{t-1}) + lambda/2 sum_i F_i [(mu_i - mu*_i)^2 + (s2_i - s2*_i)^2]

The anchor (mu*, s2*) is the posterior at the end of the last task, which is also the prior q_{t-1}.
"""

from __future__ import annotations

from evcl.methods import ewc, vcl
from evcl.methods.method import Memory, Method
from evcl.methods.terms import Term
from evcl.settings import ELASTIC, Settings


def terms(memory: Memory, s: Settings, n: int) -> list[Term]:
    return [*vcl.terms(memory, s, n), *ewc.terms(memory, s, n)]


EVCL = Method(
    name="evcl",
    summary="VCL plus an elastic, Fisher-weighted penalty on means and variances",
    bayesian=True,
    terms=terms,
    importance=ewc.importance,
    settings=ELASTIC,
)
