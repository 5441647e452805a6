"""Learning without forgetting (Li and Hoiem, 2016): the last network teaches the old heads on the new inputs.

L_t = mean NLL + strength * sum_{k < t} T^2 mean_b KL(softmax(z*_k(x_b) / T) || softmax(z_k(x_b) / T))

z*_k are the outputs of head k by the network that the last task left, on the examples of the new task; T is the
`distill_temperature`. Nothing is kept but the network itself. A task that shares its head with an earlier one has
labels of its own there, which the teacher would contradict: such a head is not taught.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl.methods.data import Minibatch, TaskData
from evcl.methods.method import Fit, Learned, Learning, Loss, Method, Round
from evcl.nn import BayesianNetwork, outputs
from evcl.settings import Setting, Settings


@dataclass(frozen=True)
class Distillation(Loss):
    """What a teacher says of each example, [R, N, classes] log-probabilities a head, is to be said again."""

    said: Sequence[Tensor]
    temperature: Tensor | float  # [R, 1]
    strength: Tensor | float  # [R, 1]
    heads: Sequence[int] = ()
    name: ClassVar[str] = "distillation"

    def __call__(self, network: BayesianNetwork, batch: Minibatch) -> Tensor:
        logits = network.logits(batch.x.flatten(0, 1), self.heads).unflatten(0, batch.rows.shape)
        replicas = torch.arange(len(logits), device=logits.device).unsqueeze(1)
        warm, total = _column(self.temperature, logits), logits.new_zeros(len(logits))
        for said, z in zip(self.said, logits.split([said.shape[2] for said in self.said], 2), strict=True):
            wanted = said[replicas % len(said), batch.rows]
            kl = F.kl_div((z / warm).log_softmax(2), wanted, reduction="none", log_target=True).sum(2)
            total = total + kl.mean(1)
        return (_column(self.strength, logits) * warm.square()).flatten().mul(total)


def _column(value: Tensor | float, like: Tensor) -> Tensor:
    """[R, 1, 1], without a copy from the host: a CUDA graph could not have one."""
    return value.view(-1, 1, 1) if isinstance(value, Tensor) else like.new_full((len(like), 1, 1), value)


@torch.no_grad()
def teach(
    tasks: Sequence[TaskData], round_: Round, temperature: Tensor | float, strength: Tensor | float
) -> list[Loss]:
    """The lessons of the network that the last round left, on these examples; none if it has no head to teach."""
    own = {task.head for task in tasks}
    heads = [k for k in dict.fromkeys(round_.seen) if k not in own]
    if not heads:
        return []
    mean, layout = round_.posterior.mean, round_.network.layout
    sizes = [round_.network.classes(k) for k in heads]
    found: list[list[Tensor]] = [[] for _ in heads]
    for task in tasks:
        z = outputs(round_.network, mean, layout, task.x, heads)
        warm = _column(temperature, z)
        for each, part in zip(found, z.split(sizes, 2), strict=True):
            each.append((part / warm).log_softmax(2))
    return [Distillation([torch.cat(each, 1) for each in found], temperature, strength, heads)]


def learn(memory: object, round_: Round, s: Settings) -> Learning:
    fitted = yield Fit(round_.tasks, losses=teach(round_.tasks, round_, s.distill_temperature, s.strength))
    return Learned(fitted.q, memory)


LWF = Method(
    name="lwf",
    summary="plain weights; the last network teaches its heads on the new task's inputs",
    bayesian=False,
    learn=learn,
    settings={
        "strength": Setting(1.0, "weight of the distillation loss", high=1e6),
        "distill_temperature": Setting(
            2.0, "softens what teacher and network say: softmax(logits / T)", low=1e-2, high=1e3
        ),
    },
)
