"""FROMP (Pan et al., 2020): keep the network's probabilities at a few memorable points of each earlier task.

    L_t = mean NLL + tau/2 sum_{s<t} sum_c (p_c(X_s) - m_sc)^T K_sc^-1 (p_c(X_s) - m_sc)

X_s are the memorable points of task s, and p_c(X_s) the probabilities of class c there. At the start of task t, with
theta* the weights that the last task left,

    m_sc = p_c(X_s; theta*),  K_sc = J_sc S J_sc^T + eps I,  J_sc = d p_c(X_s) / d theta at theta*,  S = 1 / (H + delta)

theta* knows nothing of a class that task t adds to a head: there m_sc is 0, and the probabilities of the other classes
are those among them. H is the sum over all earlier examples of the diagonal of J^T (diag(p) - p p^T) J, J the Jacobian
of the outputs: the Fisher times the number of examples. So a change of the probabilities costs little where the earlier
tasks left the weights, and with them the probabilities, undetermined; and nearby points share one cost. tau is
`strength`, delta is `prior_precision`, eps is `jitter`. The paper divides the NLL by tau instead, which is the same
except for `clip`, the maximum norm of the gradient: theirs is `clip` / tau.

When task t has ended, its memorable points are chosen: of each class equally many, those with the largest
sum_c p_c (1 - p_c), where the network is least certain. `memory` points are kept in all, and at most `points` of a
task: the authors keep 200 or 40 of every task, with which memory and steps grow with the number of tasks.

The gradient of the penalty is sum_s sum_c J_sc(theta)^T K_sc^-1 (p_c - m_sc): one backward pass of all points gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from evcl import curvature
from evcl._core.errors import EvclError
from evcl._core.randomness import Purpose, generator
from evcl._core.settings import ELASTIC, Setting, Settings
from evcl.methods.data import Minibatch, TaskData
from evcl.methods.importance import fisher
from evcl.methods.memory import examples, per_task, per_weight
from evcl.methods.method import Fit, Fitted, Learned, Learning, Loss, Method, Round, Tracker
from evcl.methods.rehearsal import filled
from evcl.methods.terms import Gradients, Number
from evcl.nn import BayesianNetwork, Gaussian, outputs
from evcl.nn.per_task import Mixture


@dataclass(frozen=True)
class Memory:
    precision: Tensor = per_weight(low=0)  # H
    points: tuple[TaskData, ...] = examples()  # of each task, the best of all classes first, then the second best, ...
    known: dict[int, Tensor] = per_task()  # task with points -> [R, 1]: the number of classes that its head has


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    if not round_.likelihood.softmax:
        raise EvclError("fromp needs class probabilities: use another method for this likelihood")
    losses = [functional(memory, round_, s)] if memory.points else []
    fitted = yield Fit(round_.tasks, losses=losses, trackers=clipping(s.clip))
    exact = {"fisher": "exact", "fisher_temperature": 1.0, "fisher_spread": 0.0, "fisher_scale": "examples"}
    h = memory.precision + fisher(fitted, round_, Settings({**s, **exact, "fisher_draws": 0}))
    points = kept(memory, fitted, round_, s)
    known = {task.task: torch.full_like(h[:, :1], round_.network.classes(task.head)) for task in points}
    return Learned(fitted.q, Memory(h, points, known))


class Block(NamedTuple):
    """Tasks with one head and equally many memorable points: S tasks, M points each."""

    head: int
    known: int  # number of classes that the head had when the last round ended
    inverse: Tensor  # K^-1: [R, S, C, M, M]


class Points(NamedTuple):
    """The memorable points of all tasks: x [R, n, ...], block by block."""

    x: Tensor
    blocks: Sequence[Block]
    row: Mixture | None = None  # with FiLM: the task of each point

    def probabilities(self, network: BayesianNetwork, before: bool = False) -> list[Tensor]:
        """[R, S, C, M] for each block, without dropout, as in predictions. `before`: among the classes that the head
        had when the last round ended, and 0 for the others.
        """
        noise, network.weights.noise = network.weights.noise, None
        with network.using(self.row):
            features = network(self.x.flatten(0, 1)).unflatten(0, self.x.shape[:2])
        parts, start = [], 0
        for head, known, inverse in self.blocks:
            r, tasks, _, points, _ = inverse.shape
            own = features[:, start : start + tasks * points].flatten(0, 1)
            start += tasks * points
            z = network.apply_heads(own, [head])
            if before:
                z[:, known:] = -torch.inf
            parts.append(z.softmax(1).view(r, tasks, points, -1).transpose(2, 3))
        network.weights.noise = noise
        return parts


@dataclass(frozen=True)
class Functional(Loss):
    """The penalty on changed probabilities."""

    points: Points
    wanted: Sequence[Tensor]  # m: [R, S, C, M] for each block
    strength: Number
    heads: Sequence[int]
    name: ClassVar[str] = "functional"

    def __call__(self, network: BayesianNetwork, batch: Minibatch) -> Tensor:
        total = batch.x.new_zeros(len(self.points.x))
        each = zip(self.points.probabilities(network), self.wanted, self.points.blocks, strict=True)
        for p, m, block in each:
            changed = p - m
            force = (block.inverse @ changed.detach().unsqueeze(4)).squeeze(4)
            total = total + ((changed - 0.5 * changed.detach()) * force).sum((1, 2, 3))  # its gradient is `force`
        return (self.strength.flatten() if isinstance(self.strength, Tensor) else self.strength) * total


def functional(memory: Memory, round_: Round, s: Settings) -> Functional:
    """The penalty of a round, at the weights that it starts from."""
    network, theta, layout = round_.network, round_.posterior.mean, round_.network.layout
    variance = 1 / (memory.precision + s.prior_precision)
    in_order = sorted(memory.points, key=lambda task: (task.head, task.y.shape[1]))
    blocks = []
    for (head, _), group in groupby(in_order, lambda task: (task.head, task.y.shape[1])):
        tasks, inverse = list(group), []
        for task in tasks:
            k = curvature.kernels(network, theta, layout, task.x, [head], variance, task.task)[1]
            k.diagonal(dim1=2, dim2=3).add_(s.jitter.unsqueeze(2).to(k) if isinstance(s.jitter, Tensor) else s.jitter)
            factor, _ = torch.linalg.cholesky_ex(k)  # does not raise where a replica has diverged
            inverse.append(torch.cholesky_inverse(factor).to(theta))
        blocks.append(Block(head, int(memory.known[tasks[0].task][0, 0]), torch.stack(inverse, 1)))
    row = None
    if network.task_weights is not None:
        places = torch.arange(len(in_order)).repeat_interleave(torch.tensor([t.y.shape[1] for t in in_order]))
        row = Mixture([t.task for t in in_order], places.expand(len(theta), -1).to(theta.device))
    points = Points(torch.cat([task.x for task in in_order], 1), blocks, row)
    # m is computed exactly as p: unless the head has grown, their difference must be 0 in the first step, as Adam would
    # enlarge a rounding error
    network.bind(theta, None, layout)
    with torch.no_grad():
        wanted = points.probabilities(network, before=True)
    return Functional(points, wanted, s.strength, list(dict.fromkeys(block.head for block in blocks)))


def kept(memory: Memory, fitted: Fitted, round_: Round, s: Settings) -> tuple[TaskData, ...]:
    """The memorable points after a round: of every task equally many, its best."""
    every = [*memory.points, *(memorable(task, fitted, round_, s.points) for task in round_.tasks)]
    source = generator(0, Purpose.MEMORY, round_.number)  # the same for every seed
    counts = filled([task.y.shape[1] for task in every], [1.0] * len(every), s.memory, source)
    return tuple(first(task, count) for task, count in zip(every, counts, strict=True) if count)


@torch.no_grad()
def memorable(task: TaskData, fitted: Fitted, round_: Round, count: int) -> TaskData:
    """Up to `count` memorable points of a task: those of rank 1 in their classes, then those of rank 2, ..."""
    z = outputs(fitted.network, fitted.q.mean, fitted.network.layout, task.x, [task.head], task=task.task)
    p = z.softmax(2)
    order = (p * (1 - p)).sum(2).sort(dim=1, descending=True, stable=True).indices  # [R, N]
    labels = task.y[torch.arange(len(order)) % len(task.y)].gather(1, order)
    ranks = torch.nn.functional.one_hot(labels, p.shape[2]).cumsum(1).gather(2, labels.unsqueeze(2)).squeeze(2)
    rows = order.gather(1, ranks.sort(dim=1, stable=True).indices)[:, :count]
    return task.select(round_.same(rows.contiguous()))


def first(task: TaskData, count: int) -> TaskData:
    """The first points of a task."""
    if task.y.shape[1] <= count:
        return task
    return task.select(torch.arange(count, device=task.y.device).expand(len(task.y), -1))


class Clip(Tracker):
    """Scales the gradient of a step down so that its norm is at most `norm`."""

    perturbs = True  # `before` changes the gradient

    def __init__(self, norm: Number) -> None:
        self.norm = norm

    def before(self, q: Gaussian, grads: Gradients) -> None:
        size = grads.mean.norm(dim=1, keepdim=True).clamp_min(1e-30)
        grads.mean.mul_((self.norm / size).clamp(max=1.0))


def clipping(norm: Number) -> list[Tracker]:
    return [Clip(norm)] if isinstance(norm, Tensor) or norm > 0 else []


FROMP = Method(
    name="fromp",
    only_classes="it protects class probabilities",
    learn=learn,
    memory=Memory,
    # On validation data of the digits in all scenarios. Without `clip`, the penalty is so stiff that new tasks are
    # hardly learned; with it, strengths of 1 and 10 and jitters of 0.001 to 0.1 end within two points of each other.
    settings={
        "strength": Setting(1.0, "tau, the weight of the penalty on changed probabilities", high=1e12),
        "memory": Setting(200, "number of memorable points kept, of all tasks together", high=100_000_000),
        "points": Setting(200, "maximum number of memorable points of a task", low=1, high=10_000),
        "prior_precision": Setting(
            0.1, "delta, the precision that every weight has before the first task", high=1e6, open_low=True
        ),
        "jitter": Setting(0.1, "eps, added to the diagonal of each kernel", high=1e6, open_low=True),
        "clip": Setting(1.0, "maximum norm of a step's gradient; 0: no limit", high=1e6),
        "fisher_examples": ELASTIC["fisher_examples"],
    },
    apart=True,
)
