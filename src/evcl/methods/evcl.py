"""EVCL: VCL plus an elastic, Fisher-weighted pull on the means and variances.

L_t = mean NLL + beta/N_t KL(q_t || q_{t-1}) + lambda/2 sum_i F_i [(mu_i - mu*_i)^2 + (s2_i - s2*_i)^2]

The anchor (mu*, s2*) is the posterior at the end of the last task, which is also the prior q_{t-1}.
"""

from __future__ import annotations

from evcl.methods.ewc import Memory, elastic, fisher
from evcl.methods.method import Fit, Learned, Learning, Method, Round
from evcl.methods.terms import KL
from evcl.settings import ELASTIC, Settings


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    kl = KL(memory.prior, s.tempering / round_.n)
    fitted = yield Fit(round_.tasks, terms=[kl, elastic(memory, s, round_.n)])
    return Learned(fitted.q, memory.after(fitted, fisher(fitted, round_, s), s.fisher_decay))


EVCL = Method(
    name="evcl",
    summary="VCL plus an elastic, Fisher-weighted penalty on means and variances",
    bayesian=True,
    learn=learn,
    memory=Memory,
    settings=ELASTIC,
    apart=True,
)
