"""Elastic weight consolidation (Kirkpatrick et al., 2017), in its online form: one anchor and an accumulated Fisher.

L_t = mean NLL + lambda/2 sum_i F_i (theta_i - theta*_i)^2,   F <- gamma F + F_t

With the default `fisher_scale`, F_t is n_t T^2 times the Fisher of task t, and F is divided by the number of new rows.
`importance` chooses another measure in place of the Fisher (see importance.py). `distill` adds a distillation loss on
the outputs (see teacher.py); plain EWC has none.
"""

from __future__ import annotations

from dataclasses import replace

from evcl._core.settings import ELASTIC, Settings
from evcl.methods.elastic_memory import Memory
from evcl.methods.importance import trackers
from evcl.methods.kronecker import MERGE, penalty, remembered
from evcl.methods.method import Fit, Learned, Learning, Method, Round
from evcl.methods.teacher import DISTILLATION, protection


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    past = protection(memory.rows, round_, s)
    terms = penalty(memory, s, round_, past.elastic)
    fitted = yield Fit(round_.tasks, terms=terms, losses=past.losses, trackers=trackers(s))
    return Learned(fitted.q, remembered(memory, fitted, round_, s))


EWC = Method(
    name="ewc",
    learn=learn,
    memory=Memory,
    settings={
        **ELASTIC,
        "kfac_merge": MERGE,
        **DISTILLATION,
        "fisher_temperature": replace(ELASTIC["fisher_temperature"], default=8.0),
    },
    apart=True,
)
