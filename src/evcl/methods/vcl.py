"""Variational continual learning (Nguyen et al., 2018): the posterior of one task is the prior of the next.

L_t = mean NLL + beta/N_t KL(q_t || q_{t-1})

This is the plain method; composed.py adds distillation.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from evcl._core.settings import Settings
from evcl.methods.kl import betas, kl
from evcl.methods.label_noise import tempering
from evcl.methods.memory import per_head, per_weight
from evcl.methods.method import ALONE, Fit, Learned, Learning, Method, Past, Round, more_rows
from evcl.methods.terms import Number
from evcl.nn import Gaussian


@dataclass(frozen=True)
class Memory:
    prior: Gaussian = per_weight(Gaussian, "prior", merge="posterior")  # q_{t-1}
    rows: dict[int, Tensor] = per_head(merge="sum")  # [R, 1]: number of rows it has learned from
    beta: dict[int, Tensor] = per_head(merge="mean")  # head, or TRUNK_KEY -> [R, 1]: the beta it was last trained with

    def units(self) -> dict[int, Tensor]:
        """What the precision of each head, and of the trunk, is divided by: see `evcl.merge`."""
        return self.beta

    def after(self, q: Gaussian, beta: Number, past: Past, round_: Round, s: Settings) -> Memory:
        """The memory after one more round."""
        return Memory(q, more_rows(self.rows, round_), betas(beta, self.beta, past, round_, s))


def learn(memory: Memory, round_: Round, s: Settings, past: Past = ALONE, start: Gaussian | None = None) -> Learning:
    """`start`: the weights that the fit starts from, if not the last posterior."""
    beta = tempering(s, round_)
    to_prior = kl(memory.prior, beta, memory.beta, past, round_, s)
    fitted = yield Fit(round_.tasks, terms=[to_prior], losses=past.losses, start=start)
    return Learned(fitted.q, memory.after(fitted.q, beta, past, round_, s))


VCL = Method(
    name="vcl",
    bayesian=True,
    learn=learn,
    memory=Memory,
)
