"""EVCL with experience replay: kept rows carry a share of the evidence of earlier tasks, and the posterior the rest.

After t-1 tasks, the posterior is q_{t-1} = p_0 L_1 ... L_{t-1}, with L_k the likelihood of task k. Kept rows of task k,
m_k of n_k, are an estimate of it: log L_k = n_k/m_k sum_kept log p(y | x), with n_k and m_k for each class of its own,
since rows are kept class by class. If they carry the share alpha of the evidence, the posterior must carry 1 - alpha,
so that each old row counts once in all:

    q_t = p_0 (L_1 ... L_{t-1})^(1-alpha) (L_1 ... L_{t-1})^alpha L_t
        = q_{t-1}^(1-alpha) p_0^alpha (L_1 ... L_{t-1})^alpha L_t,    the second power estimated by the kept rows

    (n_t + alpha N) L_t = sum_new NLL + alpha sum_k n_k/m_k sum_kept NLL + beta KL(q_t || q_{t-1}^(1-alpha) p_0^alpha)
                          + (1 - alpha) (n_t elastic + n_t distillation),    N = sum_k n_k

With s_0 and m_0 the variance and mean of p_0, q_{t-1}^(1-alpha) p_0^alpha is the Gaussian with

    precision  p = 1/s_0 + (1-alpha) (1/s - 1/s_0),    mean  m_0 + (1-alpha) (mu - m_0) / (s p)

alpha is `replay_share`. With 0, kept rows have no weight, and this is EVCL. With 1, the posterior is only the starting
point: the kept rows, each as often as it takes to stand for its task, replace it. In a linear Gaussian model, if all
rows are kept, every alpha gives the exact posterior. If the m_k rows are few, their estimate is noisy; q_{t-1} has seen
all rows, but is a Gaussian with a diagonal covariance. So alpha is how far to trust the sample over the Gaussian.

A task without kept rows is not replaced: its evidence, counted by its rows, stays in the posterior whole. The Fisher of
a round is that of the new rows alone, as in EVCL. The elastic and the distillation terms are other forms of the same
evidence of the past, and are reduced to 1 - alpha, too; kept rows are inputs of the teacher, beside the new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evcl._core.settings import Setting, Settings
from evcl._core.summaries import METHOD_SUMMARIES
from evcl.methods import evcl
from evcl.methods.data import TaskData
from evcl.methods.generative import counting, trainable
from evcl.methods.importance import trackers
from evcl.methods.kronecker import factored, penalty, remembered
from evcl.methods.label_noise import tempering
from evcl.methods.memory import per_weight
from evcl.methods.method import Asked, Fit, Learned, Learning, Loss, Method, Newcomer, Round
from evcl.methods.rehearsal import REHEARSAL, Rehearsal, class_counts, replaying, weighted
from evcl.methods.teacher import Distillation, Number, Past, Shares, protection, teach, unlearned
from evcl.methods.vcl import betas, first_precision, kl
from evcl.nn import Gaussian, head_names


@dataclass(frozen=True)
class Memory:
    inner: evcl.Memory
    rehearsal: Rehearsal
    first: Tensor = per_weight(start="prior")  # m_0


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    part, learned, rehearsal = trainable(round_), Learned(round_.posterior, memory.inner), memory.rehearsal
    if part.tasks:
        rehearsal.recalled(part)
        some = bool(represented(rehearsal, part)[0]) and bool(memory.inner.rows)
        learned = yield from _replayed(memory, part, s) if some else evcl.learn(memory.inner, part, s)
    rehearsal = rehearsal.after(round_, s)
    inner = counting(learned.memory, round_, s)
    return Learned(learned.posterior, replace(memory, inner=inner, rehearsal=rehearsal))


def log_joint(memory: Memory, q: Gaussian, asked: Asked) -> list[Tensor] | None:
    return evcl.log_joint(memory.inner, q, asked)


def domains(memory: Memory, q: Gaussian, asked: Asked, task: Newcomer) -> tuple[Tensor, Tensor] | None:
    return evcl.domains(memory.inner, q, asked, task)


def _replayed(memory: Memory, round_: Round, s: Settings) -> Learning:
    inner, n, alpha = memory.inner, round_.n, s.replay_share
    kept, rows = represented(memory.rehearsal, round_)
    size = sum(task.y.shape[1] for task in kept)
    unit = n / (n + alpha * sum(rows))  # the objective of EVCL is in units of n
    new: Shares = [(task, unit * task.y.shape[1] / n) for task in round_.tasks]
    old: Shares = [(task, unit * alpha * one / n) for task, one in zip(kept, rows, strict=True)]
    left, heads_left = remaining(kept, rows, inner.rows, alpha, round_)
    past, inputs = _reduced(protection(inner.rows, round_, s), left * unit, kept, round_)
    beta = tempering(s, round_)
    to_prior = kl(inner.prior, beta, inner.beta, past, round_, s)
    prior = tempered(to_prior.prior, first_prior(memory.first, round_, s), heads_left)
    to_prior = replace(to_prior, prior=prior, weight=unit * to_prior.weight)
    if inner.factors:
        to_prior = replace(to_prior, means=1 - factored(inner, round_))
    terms = [to_prior, *penalty(inner, s, round_, past.elastic * unit * (left if inner.factors else heads_left))]
    data = [weighted(task, 2 * share * n / task.y.shape[1]) for task, share in new]
    fit = Fit(data, terms, past.losses, trackers=trackers(s))
    fitted = yield replaying(fit, [weighted(task, 2 * share * size / task.y.shape[1]) for task, share in old], s)
    fitted = unlearned(fitted, to_prior.prior, past, round_, [*new, *old], inputs)
    return Learned(fitted.q, remembered(inner, fitted, round_, s, betas(beta, inner.beta, past, round_, s)))


def represented(rehearsal: Rehearsal, round_: Round) -> tuple[list[TaskData], list[int]]:
    """The kept rows of heads that are trained, and how many rows each of these tasks stands for: those of its classes
    that have kept rows. A kept row has the weight of the rows of its class that it stands for, with mean 1: classes are
    kept in equal numbers, not in proportion.
    """
    kept, rows = [], []
    for i, task in enumerate(rehearsal.kept):
        if round_.network.classes(task.head) > 1:
            had = rehearsal.rows[i]
            have = class_counts(task, had.shape[1], len(had))
            shown = torch.where(have > 0, had, 0)
            each = (shown / have.clamp_min(1)).gather(1, task.y) * task.y.shape[1] / shown.sum(1, keepdim=True)
            weights = each.to(task.x) if task.weights is None else each.to(task.x) * task.weights
            kept.append(task if bool((each == 1).all()) else replace(task, weights=weights))
            rows.append(int(shown[0].sum()))
    return kept, rows


def remaining(
    kept: Sequence[TaskData], rows: Sequence[int], seen: Mapping[int, Tensor], alpha: Number, round_: Round
) -> tuple[Tensor, Tensor]:
    """The share of the evidence of earlier tasks that the posterior still carries: [R, 1] of all rows, and [R, P] with
    the heads' own. `rows`: how many rows the kept ones stand for, which alone can be replaced; `seen`: all rows that
    each head has learned.
    """
    layout = round_.network.layout
    left = (1 - alpha * sum(rows) / torch.stack(list(seen.values())).sum(0)).clamp_min(0)
    each = left.expand_as(round_.posterior.mean).clone()
    for k, total in seen.items():
        own = sum(one for task, one in zip(kept, rows, strict=True) if task.head == k)
        for name in head_names(k).values():
            each[:, layout.spans[name]] = (1 - alpha * own / total).clamp_min(0)
    return left, each


def first_prior(mean: Tensor, round_: Round, s: Settings) -> Gaussian:
    """p_0, with these means."""
    return Gaussian(mean, -0.5 * first_precision(round_, s).log().expand_as(mean))


def tempered(q: Gaussian, first: Gaussian, left: Tensor) -> Gaussian:
    """q^left first^(1 - left), for the evidence that q has beyond the first prior."""
    assert q.log_std is not None
    assert first.log_std is not None
    own, start = (-2 * q.log_std).exp(), (-2 * first.log_std).exp()
    precision = start + left * (own - start).clamp_min(0)
    mean = first.mean + left * own / precision * (q.mean - first.mean)
    same = left == 1
    return Gaussian(torch.where(same, q.mean, mean), torch.where(same, q.log_std, -0.5 * precision.log()))


def _reduced(past: Past, by: Tensor, kept: Sequence[TaskData], round_: Round) -> tuple[Past, Shares]:
    """The distillation losses times `by` [R, 1], with the kept rows as further inputs; and the shares of the inputs,
    half of which are kept rows.
    """
    losses: list[Loss] = []
    for loss in past.losses:
        assert isinstance(loss, Distillation)
        strengths: dict[int, Number] = {k: by * w for k, w in zip(loss.heads, loss.strength, strict=True)}
        losses += teach([*round_.tasks, *kept], round_, loss.temperature, strengths)
    together = TaskData(torch.cat([task.x for task in kept], 1), torch.cat([task.y for task in kept], 1), kept[0].head)
    return past._replace(losses=losses), [
        *((task, 0.5 * task.y.shape[1] / round_.n) for task in round_.tasks),
        (together, 0.5),
    ]


def with_replay(method: Method, **changes: Any) -> Method:
    """Add a memory of examples to EVCL, or to EVCL with other defaults."""
    settings = {**method.settings, **REHEARSAL, "replay_share": SHARE}
    replayed = replace(
        method,
        learn=learn,
        memory=Memory,
        log_joint=log_joint,
        domains=domains,
        settings=settings,
        shares=f"{method.shares} and evidence",
    )
    return replace(replayed, **changes)


SHARE = Setting(
    0.75,
    "alpha, the share of the evidence of earlier tasks that kept or generated rows carry; the posterior has the rest",
    high=1.0,
)
EVCL_ER = with_replay(evcl.EVCL, name="evcl-er", summary=METHOD_SUMMARIES["evcl-er"])
