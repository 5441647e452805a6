"""Temporal-difference VCL (Melo et al., 2024): the KL to the last n posteriors, rather than to the last one alone.

The posterior after task t is that after task t-1-k times the likelihood of the k+1 tasks since, for every k. VCL uses
k = 0. TD-VCL averages the objectives for k = 0, ..., n-1, so that an error of one posterior counts for less:

    N_t L_t = sum_{i=0}^{n-1} c_i NLL(D_{t-i}) + beta sum_{k=0}^{n-1} w_k KL(q_t || q_{t-1-k})

    w_k = lambda^k / sum_j lambda^j,    c_i = sum_{k >= i} w_k

NLL(D) is the sum over a task's rows; c_0 = 1. n is `anchors`, at most t, because the first prior q_0 is the oldest
posterior; lambda is `anchor_decay`, and 1 gives the authors' n-step KL, with w_k = 1/n and c_i = (n-i)/n. `memory` rows
of each of the last n-1 tasks are kept, and stand for all its rows. Half of each batch is drawn from them, with weights
that make the mean NLL of a batch a multiple of the first sum.

Rows are needed: without D_{t-i} its only trace is the ratio q_{t-i} / q_{t-i-1}. With that in place of the likelihood,
every objective of the average is VCL's. To leave the likelihood out would count the task with weight 1 - c_i only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evcl._core.randomness import Purpose
from evcl._core.settings import TRAINING, Setting, Settings
from evcl.methods.data import TaskData, shuffled
from evcl.methods.kl import KL, widened
from evcl.methods.label_noise import tempering
from evcl.methods.memory import examples, per_task, per_weight
from evcl.methods.method import Fit, Fitted, Learned, Learning, Method, Round
from evcl.methods.samplers import Mixed
from evcl.methods.terms import Number, Term
from evcl.nn import Gaussian

KEPT_SHARE = 0.5  # fraction of a batch that is drawn from kept rows


@dataclass(frozen=True)
class Memory:
    prior: Gaussian = per_weight(Gaussian, "prior")  # q_{t-1}
    older: tuple[Gaussian, ...] = per_weight(tuple, "prior")  # q_{t-2}, q_{t-3}, ...
    beta: Tensor = per_weight(low=0)  # the beta that each weight was last trained with; 0: never
    betas: tuple[Tensor, ...] = per_weight(tuple, low=0)  # the same for the older posteriors
    kept: tuple[TaskData, ...] = examples()  # weights: how many rows of the task each of them stands for
    rounds: dict[int, Tensor] = per_task()  # task -> [R, 1]: the round that learned it


def shares(decay: Number, n: int) -> list[Number]:
    """w_0, ..., w_{n-1}: one number for all replicas, or [R, 1] each."""
    powers = [decay**k for k in range(n)]
    return [power / sum(powers) for power in powers]


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    beta, new = tempering(s, round_), _new(s.batch_size) if memory.kept else 1.0
    anchors, betas = (memory.prior, *memory.older), (memory.beta, *memory.betas)
    w = shares(s.anchor_decay, len(anchors))
    terms: list[Term] = []
    for w_k, anchor, before in zip(w, anchors, betas, strict=True):
        share = torch.where(before > 0, before / beta, 1.0) if isinstance(s.tempering, str) else 1.0
        terms.append(KL(widened(anchor, share, round_, s), new * w_k * beta / round_.n))
    kept = [_weighted(task, w, new, memory, round_) for task in memory.kept]
    sampler = Mixed(KEPT_SHARE, len(round_.tasks)) if kept else shuffled
    fitted = yield Fit([*round_.tasks, *kept], terms=terms, sampler=sampler)
    return Learned(fitted.q, _after(memory, fitted, beta, round_, s))


def _new(batch: int) -> float:
    """The fraction of a batch that is new; the whole objective is multiplied by it."""
    return 1 - min(round(KEPT_SHARE * batch), batch - 1) / batch


def _weighted(task: TaskData, w: list[Number], new: float, memory: Memory, round_: Round) -> TaskData:
    """Kept rows with their weights in a fit: `new` c_i / N_t for each row that they stand for. The kept part of a batch
    is drawn from all kept rows alike, and has the fraction 1 - `new`.
    """
    assert task.weights is not None
    since = sorted({_learned_in(one, memory) for one in memory.kept}, reverse=True)  # every round keeps rows
    c_i = sum(w[1 + since.index(_learned_in(task, memory)) :])
    rows = sum(one.y.shape[1] for one in memory.kept)
    return replace(task, weights=c_i * task.weights * (rows * new / (1 - new) / round_.n))


def _learned_in(task: TaskData, memory: Memory) -> int:
    return int(memory.rounds[task.task].flatten()[0])


def _after(memory: Memory, fitted: Fitted, beta: Number, round_: Round, s: Settings) -> Memory:
    """The memory after one more round: the last n posteriors, and rows of the last n-1 rounds."""
    like, n = fitted.q.mean, s.anchors - 1
    rounds = {**memory.rounds, **{task.task: like.new_full((len(like), 1), round_.number) for task in round_.tasks}}
    kept = [*memory.kept, *(_some(task, i, round_, s) for i, task in enumerate(round_.tasks))]
    kept = [task for task in kept if int(rounds[task.task].flatten()[0]) > round_.number - n]
    return Memory(
        fitted.q,
        (memory.prior, *memory.older)[:n],
        torch.where(fitted.used > 0, beta, memory.beta),
        (memory.beta, *memory.betas)[:n],
        tuple(kept),
        {task.task: rounds[task.task] for task in kept},
    )


def _some(task: TaskData, i: int, round_: Round, s: Settings) -> TaskData:
    """Random rows of a task."""
    sample = task.select(task.drawn(round_.generators(Purpose.KEPT, i), s.memory))
    return replace(sample, weights=sample.counts * (task.y.shape[1] / sample.y.shape[1]))


# The authors use 4 to 8 anchors and a decay of 0.5 or 0.9. On the validation data of the digits, 0.5 to 1 are alike,
# and more anchors are better as long as there are tasks for them.
TD_VCL = Method(
    name="td-vcl",
    bayesian=True,
    learn=learn,
    memory=Memory,
    settings={
        "anchors": Setting(
            5, "n, the number of last posteriors that the KL is averaged over; 1: VCL", low=1, high=1000
        ),
        "anchor_decay": Setting(
            0.5, "lambda, the weight of each posterior in that average relative to the next newer one", high=1.0
        ),
        "memory": Setting(
            200, "number of examples kept of each of the last anchors - 1 tasks", low=1, high=100_000_000
        ),
        "batch_size": replace(TRAINING["batch_size"], low=2),
    },
)
