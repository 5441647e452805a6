"""EVCL with experience replay: kept rows carry a share of the evidence of earlier tasks, and the posterior the rest.

After t-1 tasks the posterior is q_{t-1} = p_0 L, with L the likelihood of all earlier rows. L is known in two forms.
One is q_{t-1} itself, a Gaussian with means mu and a diagonal covariance. The other is a function of the outputs: the
expected log-likelihood of a label that the network with the weights mu gives to an input x is, up to a constant,

    log f(x) = -KL(softmax(z*(x)) || softmax(z(x))),    z* = z at mu

F = prod f(x) over the earlier inputs has its maximum at mu, where the gradients of L and p_0 cancel. So F contains the
pull of the first prior, and what is left of that prior is centred at mu. In a linear Gaussian model this is exact:

    q_{t-1} = N(mu, s_0) F,    s_0 the variance of p_0

F takes the covariances into account, but is estimated from few rows; the Gaussian has seen all rows. A share alpha
(`replay_share`) of the evidence is in the second form, and the rest in the first, so that each old row counts once:

    q_t = q_{t-1}^(1-alpha) [N(mu, s_0) F]^alpha L_t,    L_t the likelihood of the new rows

So EVCL with replay minimises, n_k being the number of rows of task k and n that of the new task,

    mean NLL + alpha/n sum_k n_k T^2 mean_x KL(softmax(z*(x)/T) || softmax(z(x)/T)),  x of task k
    + beta/n KL(q_t || q_{t-1}^(1-alpha) N(mu, s_0)^alpha) + (1 - alpha) elastic term

q_{t-1}^(1-alpha) N(mu, s_0)^alpha is the Gaussian with the means mu and the precision 1/s_0 + (1-alpha) (1/s - 1/s_0).
T is `distill.temperature`: a softened output also says which of the other classes an input resembles. With the factor
T^2 its curvature is in the unit of that of the NLL, whatever T is: with it, an old row counts once. Labels of kept
rows are not learned again: each says less than the outputs of a network that has seen all rows, and would count twice
beside them. In a linear Gaussian model of which all rows are kept, every alpha gives the exact posterior. With 0, this
is EVCL without distillation.

The inputs x of task k are its m_k kept rows and, as these are few, mixtures of two of them (compare mixup, Zhang et
al., 2018),

    x = u x_i + (1 - u) x_j,    u uniform in 0 to 1

until they are as many as the rows that they stand for, or those of all tasks as many as the new rows. So the outputs
are held between the few kept rows, too. Kept rows stand for rows of their class: classes are kept in equal numbers.
Tokens cannot be mixed; then the kept rows stand alone.

A task without kept rows is not replaced: its evidence, counted by its rows, stays in the posterior whole. The Fisher of
a round is that of the new rows alone, as in EVCL. Distillation of other inputs would count the past once more, so that
it is left out as soon as there are kept rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.randomness import Purpose
from evcl._core.settings import Setting, Settings
from evcl.methods import evcl, task_inference
from evcl.methods.composed import DISTILLED, EVCL
from evcl.methods.data import TaskData
from evcl.methods.distillation import Distil, Distillation, column, of_inner, with_fits
from evcl.methods.kronecker import MEASURES
from evcl.methods.method import Fit, Learned, Learning, Method, Past, Round
from evcl.methods.parts import without
from evcl.methods.rehearsal import KEPT, REHEARSAL, Rehearsal, class_counts, replaying, weighted
from evcl.methods.task_inference import counting, trainable
from evcl.methods.terms import Number
from evcl.nn import head_names, outputs

IMPOSSIBLE_LOGIT = -1e9  # the logit of a class whose probability is 0
MAX_KEPT_INPUTS = 10_000  # maximum number of kept rows and mixtures, unless more rows are kept


@dataclass(frozen=True)
class Memory:
    inner: task_inference.Memory
    rehearsal: Rehearsal


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    part, learned, rehearsal = trainable(round_), Learned(round_.posterior, memory.inner), memory.rehearsal
    if part.tasks:
        rehearsal.recalled(part)
        some = bool(represented(rehearsal, part)[0]) and bool(memory.inner.rows)
        learned = yield from _replayed(memory, part, s) if some else DISTILLED.learn(memory.inner, part, s)
    rehearsal = rehearsal.after(round_, s)
    inner = counting(learned.memory, round_, s)
    return Learned(learned.posterior, Memory(inner, rehearsal))


def _replayed(memory: Memory, round_: Round, s: Settings) -> Learning:
    inner, alpha, by = memory.inner, s.replay_share, MEASURES[s.importance]
    kept, rows = represented(memory.rehearsal, round_)
    inputs = completed(kept, rows, round_)
    left, each = remaining(kept, rows, inner.rows, alpha, round_)
    evidence = recalled(inputs, [alpha * one / round_.n for one in rows], memory.rehearsal, round_, s)

    def replayed(fit: Fit) -> Fit:
        fit = replace(fit, data=[weighted(task, 2.0) for task in fit.data])
        return replaying(fit, [weighted(task, 0.0) for task in inputs], s)

    past = Past([evidence], each, left if inner.factors else each)
    if s.get("posterior") == "kronecker":
        past = Past([evidence], left)
    return with_fits(evcl.learn(inner, round_, s, past, by), replayed)


@torch.no_grad()
def recalled(
    inputs: Sequence[TaskData], shares: Sequence[Number], rehearsal: Rehearsal, round_: Round, s: Settings
) -> Distillation:
    """sum_k share_k T^2 mean_x KL(softmax(z*(x)/T) || softmax(z(x)/T)), over the inputs of task k, in batches of which
    half the rows are inputs. The last posterior knew nothing of a class that was added to a head since: there, its
    probability is 0.
    """
    network, mean, warm = round_.network, round_.posterior.mean, Distil.of(s).temperature
    known: dict[int, int] = {}
    for i, task in enumerate(rehearsal.kept):
        known[task.head] = max(known.get(task.head, 0), rehearsal.rows[i].shape[1])
    heads = list(dict.fromkeys(task.head for task in inputs))
    at, size = sum(task.y.shape[1] for task in round_.tasks), sum(task.y.shape[1] for task in inputs)
    said = [mean.new_zeros(len(mean), at + size, network.classes(k)) for k in heads]
    strengths = [mean.new_zeros(len(mean), at + size) for _ in heads]
    for task, share in zip(inputs, shares, strict=True):
        k, m = heads.index(task.head), task.y.shape[1]
        z = outputs(network, mean, network.layout, task.x, [task.head], task=task.task) / column(warm, mean)
        z[:, :, known[task.head] :] = IMPOSSIBLE_LOGIT
        said[k][:, at : at + m] = z.log_softmax(2)
        own = torch.ones_like(mean[:, :1]) if task.weights is None else task.weights
        strengths[k][:, at : at + m] = 2 * share * size / m * own
        at += m
    return Distillation(said, warm, strengths, heads, again=lambda x: [one[:, :0] for one in said])


def completed(kept: Sequence[TaskData], rows: Sequence[int], round_: Round) -> list[TaskData]:
    """The kept rows and their mixtures. The inputs of all tasks together are as many as the new rows, and those of a
    task at most as many as the rows that it stands for.
    """
    network, new = round_.network, sum(task.y.shape[1] for task in round_.tasks)
    if network.takes_tokens or network.call.form is not None:
        return list(kept)
    most = min(new, MAX_KEPT_INPUTS) // len(kept)
    return [_mixed(task, min(n, most) - task.y.shape[1], round_) for task, n in zip(kept, rows, strict=True)]


def _mixed(task: TaskData, count: int, round_: Round) -> TaskData:
    """The task with `count` further rows, each a mixture of two of its own."""
    m = task.y.shape[1]
    if count <= 0 or m < 2:
        return task
    sources = round_.generators(Purpose.MIXTURES, task.task)
    pairs = torch.stack([torch.randint(m, (2, count), generator=g) for g in sources], 1).to(task.y.device)
    u = torch.stack([torch.rand(count, generator=g) for g in sources]).to(task.x)
    one, other = task.select(pairs[0]), task.select(pairs[1])
    x = torch.lerp(other.x, one.x, u.view(*u.shape, *[1] * (task.x.dim() - 2)))
    weights = task.weights
    if weights is not None and one.weights is not None and other.weights is not None:
        every = torch.cat([weights, torch.lerp(other.weights, one.weights, u)], 1)
        weights = every * weights.mean(1, keepdim=True) / every.mean(1, keepdim=True)
    return replace(task, x=torch.cat([task.x, x], 1), y=torch.cat([task.y, one.y], 1), weights=weights)


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
            counts = torch.where(have > 0, had, 0)
            each = (counts / have.clamp_min(1)).gather(1, task.y) * task.y.shape[1] / counts.sum(1, keepdim=True)
            weights = each.to(task.x) if task.weights is None else each.to(task.x) * task.weights
            kept.append(task if bool((each == 1).all()) else replace(task, weights=weights))
            rows.append(int(counts[0].sum()))
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


def with_replay(method: Method, **changes: Any) -> Method:
    """Add a memory of examples to EVCL, or to EVCL with other defaults."""
    if method.learn is not EVCL.learn:
        raise EvclError(f'{method.name} has a `learn` of its own, which evcl-er\'s would replace: set kept_as="rows"')
    settings = {**method.settings, **REHEARSAL, "replay_share": SHARE}
    log_joint, domains = of_inner(method.log_joint), of_inner(method.domains)
    structure = of_inner(method.structure)
    replayed = replace(
        method, learn=learn, memory=Memory, log_joint=log_joint, domains=domains, settings=settings, structure=structure
    )
    replayed = replace(replayed, parts=[*without(method, "distillation", "forgetting"), KEPT])  # see above
    return replace(replayed, **changes)


SHARE = Setting(
    0.9,
    "alpha, the share of the evidence of earlier tasks that kept or generated rows carry; the posterior has the rest",
    high=1.0,
)
EVCL_ER = with_replay(EVCL, name="evcl-er", summary="")
