"""Variational continual learning (Nguyen et al., 2018): the posterior of one task is the prior of the next.

L_t = mean NLL + beta/N_t KL(q_t || q_{t-1})

`distill` adds a pull on what the network says, see teacher.py; plain VCL has none.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from evcl.methods.memory import per_task, per_weight
from evcl.methods.method import Fit, Learned, Learning, Method, Round
from evcl.methods.teacher import DISTILLATION, held, kl, more_rows
from evcl.nn import Gaussian
from evcl.settings import Settings


@dataclass(frozen=True)
class Memory:
    prior: Gaussian = per_weight(Gaussian, "prior")  # q_{t-1}
    rows: dict[int, Tensor] = per_task()  # head -> [R, 1]: how many it has learned


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    past = held(memory.rows, round_, s)
    fitted = yield Fit(round_.tasks, terms=[kl(memory.prior, memory.rows, past, round_, s)], losses=past.lessons)
    return Learned(fitted.q, Memory(fitted.q, more_rows(memory.rows, round_)))


VCL = Method(
    name="vcl",
    summary="a Gaussian over each weight, carried on as the next prior",
    bayesian=True,
    learn=learn,
    memory=Memory,
    settings=DISTILLATION,
)
