"""Elastic weight consolidation (Kirkpatrick et al., 2017), in its online form: one anchor and an accumulated Fisher.

L_t = mean NLL + lambda/2 sum_i F_i (theta_i - theta*_i)^2,   F <- gamma F + F_t

With the default `fisher_scale`, F_t is n_t times the Fisher of task t, and F is divided by the number of new rows.
This is the plain method; composed.py adds distillation, and other measures of importance.
"""

from __future__ import annotations

from dataclasses import replace

from evcl._core.settings import ELASTIC, Settings
from evcl.methods.elastic_memory import FISHER, Importance, Memory
from evcl.methods.method import ALONE, Fit, Learned, Learning, Method, Past, Round


def learn(memory: Memory, round_: Round, s: Settings, past: Past = ALONE, by: Importance = FISHER) -> Learning:
    terms = by.penalty(memory, s, round_, past.elastic)
    fitted = yield Fit(round_.tasks, terms=terms, losses=past.losses, trackers=by.trackers())
    return Learned(fitted.q, by.remembered(memory, fitted, round_, s))


EWC = Method(
    name="ewc",
    learn=learn,
    memory=Memory,
    settings={
        **ELASTIC,
        "importance": replace(ELASTIC["importance"], choices=("fisher",)),
        "fisher_temperature": replace(ELASTIC["fisher_temperature"], default=8.0),
    },
    apart=True,
)
