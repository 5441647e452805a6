"""An elastic term on functions: what the last network says of the new inputs is to be said again.

    sum_k  w_k T^2 mean_b KL(softmax(z*_k(x_b) / T) || softmax(z_k(x_b) / T))

z*_k are the outputs of head k by the network that the last task left (of a posterior, by its means), on the examples of
the new task; T is the `distill_temperature`. Nothing is kept but the network itself. The elastic term on weights is the
same to second order, on the inputs that are gone: each sees what the other does not.

A head that no task of the round uses is taught with w_k = n_k / n, the rows it has learned over the rows of the round.
A head that is used again has labels of its own, which may agree with the teacher or contradict it. `agreement` asks up
to 1,000 of the new rows: the teacher knows, of log C nats that there are to know,

    knows = 1 - NLL / log C,    and is surprised by    (NLL - H) / log C,

where H, its mean entropy, is the NLL that it expects. Both lie between 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl._core.settings import Setting, Settings
from evcl.likelihoods import CATEGORICAL
from evcl.methods.data import Minibatch, TaskData
from evcl.methods.method import Loss, Round
from evcl.nn import BayesianNetwork, outputs

ASKED = 1000  # new rows that tell whether they agree with the old
USUAL = 0.15  # EVCL's `distill`: more costs what is learned anew, less forgets more
UNTAUGHT = 1.7  # times the pull on weights where no teacher makes up for what a diagonal does not see
MOST = 10.0  # the most that a taught head counts for, next to the new task: more, and that is hardly learned
Number = Tensor | float  # one for all replicas, or [R, 1]

DISTILLATION: dict[str, Setting] = {
    "distill": Setting(
        0.0, "weight of what the last network says of the new inputs; 0: the past is held by weights alone", high=1e6
    ),
    "distill_temperature": Setting(
        2.0, "softens what teacher and network say: softmax(logits / T)", low=1e-2, high=1e3
    ),
}


@dataclass(frozen=True)
class Distillation(Loss):
    """What a teacher says of each example, [R, N, classes] log-probabilities a head, is to be said again."""

    said: Sequence[Tensor]
    temperature: Number
    strength: Sequence[Number]  # of each head
    heads: Sequence[int] = ()
    name: ClassVar[str] = "distillation"

    def __call__(self, network: BayesianNetwork, batch: Minibatch) -> Tensor:
        logits = batch.logits(network, self.heads)
        replicas = torch.arange(len(logits), device=logits.device).unsqueeze(1)
        warm, total = column(self.temperature, logits), logits.new_zeros(len(logits))
        parts = logits.split([said.shape[2] for said in self.said], 2)
        for said, strength, z in zip(self.said, self.strength, parts, strict=True):
            wanted = said[replicas % len(said), batch.rows]
            kl = F.kl_div((z / warm).log_softmax(2), wanted, reduction="none", log_target=True).sum(2)
            total = total + column(strength, logits).flatten() * kl.mean(1)
        found: Tensor = warm.square().flatten() * total
        return found


def column(value: Number, like: Tensor) -> Tensor:
    """[R, 1, 1], without a copy from the host: a CUDA graph could not have one."""
    return value.view(-1, 1, 1) if isinstance(value, Tensor) else like.new_full((len(like), 1, 1), value)


@torch.no_grad()
def teach(tasks: Sequence[TaskData], round_: Round, temperature: Number, strengths: Mapping[int, Number]) -> list[Loss]:
    """The lessons of the network that the last round left, on these examples: of these heads, with these strengths."""
    heads = list(strengths)
    if not heads:
        return []
    mean, layout = round_.posterior.mean, round_.network.layout
    sizes = [round_.network.classes(k) for k in heads]
    found: list[list[Tensor]] = [[] for _ in heads]
    for task in tasks:
        z = outputs(round_.network, mean, layout, task.x, heads)
        warm = column(temperature, z)
        for each, part in zip(found, z.split(sizes, 2), strict=True):
            each.append((part / warm).log_softmax(2))
    return [Distillation([torch.cat(each, 1) for each in found], temperature, list(strengths.values()), heads)]


def others(tasks: Sequence[TaskData], round_: Round) -> list[int]:
    """The heads of earlier rounds that none of these tasks uses."""
    own = {task.head for task in tasks}
    return [k for k in dict.fromkeys(round_.seen) if k not in own]


class Agreement(NamedTuple):
    """Of a teacher with the labels of new rows, [R, 1] each."""

    knows: Tensor
    surprised: Tensor


@torch.no_grad()
def agreement(task: TaskData, round_: Round) -> Agreement:
    """Of the network that the last round left; rows are drawn, since files may be sorted."""
    n = task.y.shape[1]
    drawn = torch.stack([torch.randperm(n, generator=g)[:ASKED] for g in round_.generators("agreement")])
    x, y = task.take(drawn.to(task.y.device))
    z = outputs(round_.network, round_.posterior.mean, round_.network.layout, x, [task.head]).log_softmax(2)
    nll = -z.gather(2, y.unsqueeze(2)).squeeze(2).mean(1, keepdim=True)
    entropy = -(z.exp() * z).sum(2).mean(1, keepdim=True)
    most = math.log(max(2, z.shape[2]))
    return Agreement((1 - nll / most).clamp(0, 1), ((nll - entropy) / most).clamp(0, 1))


class Past(NamedTuple):
    """How a round is to hold on to the past."""

    lessons: list[Loss]  # by functions
    prior: Number  # by weights: how much of the last posterior's precision is kept, [R, 1] or one for all
    elastic: Number  # and of the elastic term


def held(rows: Mapping[int, Tensor], round_: Round, s: Settings) -> Past:
    """`rows` are those that each head has learned, [R, 1] each.

    The past counts once. Where a head is used again, `knows` of it is held by the teacher, and the weights let go of as
    much; where the new rows contradict the old, nothing can be taught, and the weights hold on the more. What other
    heads have learned is held in any case.
    """
    likelihood = round_.likelihood
    if likelihood is not CATEGORICAL or (not isinstance(s.distill, Tensor) and s.distill == 0):
        return Past([], 1.0, 1.0)
    n, strengths = round_.n, {}
    for k in others(round_.tasks, round_):
        strengths[k] = s.distill * (rows[k] / n).clamp(max=MOST) if k in rows else s.distill
    prior: Number = 1.0
    elastic: Number = 1.0
    head = round_.tasks[0].head
    if len(round_.tasks) == 1 and head in rows:
        knows, surprised = agreement(round_.tasks[0], round_)
        whole = s.distill / USUAL
        whole = whole.clamp(max=1.0) if isinstance(whole, Tensor) else min(1.0, whole)
        strengths[head] = whole * knows * (rows[head] / n).clamp(max=1.0)
        share = whole * rows[head] / torch.stack(list(rows.values())).sum(0)  # of the past that is this head's
        prior = 1 - share * (1 - torch.maximum(knows, surprised))
        elastic = 1 - share * (1 - UNTAUGHT * surprised)
    return Past(teach(round_.tasks, round_, s.distill_temperature, strengths), prior, elastic)


def more_rows(rows: Mapping[int, Tensor], round_: Round) -> dict[int, Tensor]:
    """`rows` after this round."""
    found, like = dict(rows), round_.posterior.mean
    for task in round_.tasks:
        added = like.new_full((len(like), 1), task.y.shape[1])
        found[task.head] = found[task.head] + added if task.head in found else added
    return found
