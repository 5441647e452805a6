"""EWC with a Kronecker-factored Fisher (Ritter, Botev and Barber, 2018): Laplace's approximation, task after task.

L_t = mean NLL + lambda/2 sum_l tr(D_l^T G_l D_l A_l),   D_l = [W_l, b_l] - [W*_l, b*_l]

The factors and their merging are in kronecker.py. `distill` adds a distillation loss on the outputs (see teacher.py).
"""

from __future__ import annotations

from dataclasses import replace

from evcl._core.settings import ELASTIC, Settings
from evcl._core.summaries import METHOD_SUMMARIES
from evcl.methods.kronecker import MERGE, Memory, at_most_one, measured, penalty
from evcl.methods.method import Fit, Learned, Learning, Method, Round
from evcl.methods.teacher import DISTILLATION, held


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    past = held(memory.rows, round_, s)
    fitted = yield Fit(round_.tasks, terms=penalty(memory, s, round_, at_most_one(past.elastic)), losses=past.lessons)
    factors, rest = measured(memory, fitted, round_, s)
    return Learned(fitted.q, replace(memory, factors=factors).after(fitted, round_, rest, s.fisher_decay))


KFAC_EWC = Method(
    name="kfac-ewc",
    summary=METHOD_SUMMARIES["kfac-ewc"],
    bayesian=False,
    learn=learn,
    memory=Memory,
    settings={
        **ELASTIC,
        **DISTILLATION,
        "strength": replace(ELASTIC["strength"], default=1.0),  # Laplace's
        "merge": MERGE,
    },
    apart=True,
)
