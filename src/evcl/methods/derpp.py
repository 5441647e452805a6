"""DER++, dark experience replay (Buzzega et al., 2020): keep the network's outputs for the kept rows, too.

    L_t = mean NLL of a batch of the new task
          + alpha mean_b 1/C ||z(x_b) - z*_b||^2        for a first draw of kept rows
          + beta mean NLL                               for a second draw of kept rows

z* are the logits of the row's own head, C of them, when its task had been learned; they are stored with the row and
never change. If the head has grown since, only the outputs that it had then are compared. The authors store the outputs
of a row when it is first seen, in the middle of its task, and each of their draws has as many rows as the batch. Here
each has half as many, so that a step has no more rows than one of `er`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from evcl._core.settings import Setting, Settings
from evcl.methods.applied import LogitLoss
from evcl.methods.data import Minibatch, TaskData
from evcl.methods.distillation import column
from evcl.methods.memory import per_task
from evcl.methods.method import Fit, Fitted, Learned, Learning, Method, Round
from evcl.methods.rehearsal import REHEARSAL, Rehearsal, chosen, weighted
from evcl.methods.samplers import Interleaved
from evcl.methods.terms import Number
from evcl.nn import BayesianNetwork, outputs


@dataclass(frozen=True)
class Memory:
    rehearsal: Rehearsal
    logits: dict[int, Tensor] = per_task()  # task -> [R, m, C]: those of its kept rows


@dataclass(frozen=True)
class DarkReplay(LogitLoss):
    """`weight` times the mean of ||z - z*||^2 / C over every fourth row of a batch: those of the second copy of the
    kept rows, whose numbers begin at `first`. It is a sum divided by the size of the batch, as for a part of one.
    """

    wanted: Tensor  # [R, m, columns of all heads]: z*, 0 where there is none
    compared: Tensor  # [m, columns of all heads]: 1 / C for the columns that are compared, otherwise 0
    first: int
    weight: Number
    heads: Sequence[int]
    name: ClassVar[str] = "logits"

    def __call__(self, network: BayesianNetwork, batch: Minibatch) -> Tensor:
        part = Minibatch(*(None if one is None else one[:, 3::4] for one in batch))  # type: ignore[arg-type]
        if not part.rows.numel():
            return batch.x.new_zeros(len(batch.x))
        return self._of(part.logits(network, self.heads), part.rows, batch.rows.shape[1])[0]

    def of_logits(self, z: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        gradient = torch.zeros_like(z)
        value, gradient[:, 3::4] = self._of(z[:, 3::4], rows[:, 3::4], rows.shape[1])
        return value, gradient

    def _of(self, z: Tensor, rows: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """The loss, and its gradient with respect to these logits, in a batch of this size."""
        place = rows - self.first
        away = z - self.wanted[torch.arange(len(rows), device=rows.device).unsqueeze(1), place]
        pull = column(self.weight, z) * (4 / size) * away * self.compared[place]
        return (pull * away).sum((1, 2)), 2 * pull


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    fitted = yield _fit(memory, round_, s) if memory.rehearsal.recalled(round_) else Fit(round_.tasks)
    picked = chosen(memory.rehearsal, round_, s)
    logits = {}
    for task, rows in picked:
        known = memory.logits.get(task.task)
        places = rows.unsqueeze(2)
        if known is None:
            logits[task.task] = _said(fitted, task.select(rows))
        else:
            logits[task.task] = known.gather(1, places.expand(-1, -1, known.shape[2]))
    return Learned(fitted.q, Memory(memory.rehearsal.keeping(picked, round_), logits))


def _fit(memory: Memory, round_: Round, s: Settings) -> Fit:
    """The weights of rows make up for the numbers of rows: in a step of 4 rows, 2 are new, 1 has a label to repeat, and
    1 has logits to keep.
    """
    kept, n = memory.rehearsal.kept, len(round_.tasks)
    like = round_.posterior.mean
    new = [weighted(task, 2.0) for task in round_.tasks]
    labelled, plain = ([weighted(task, w) for task in kept] for w in (4 * s.beta, 0.0))
    heads = sorted({task.head for task in (*round_.tasks, *kept)})
    starts, columns = {}, 0
    for k in heads:
        starts[k], columns = columns, columns + round_.network.classes(k)
    size = sum(task.y.shape[1] for task in kept)
    wanted, compared, at = like.new_zeros(len(like), size, columns), like.new_zeros(size, columns), 0
    for task in kept:
        z, start = memory.logits[task.task], starts[task.head]
        rows, where = slice(at, at + z.shape[1]), slice(start, start + z.shape[2])
        wanted[:, rows, where], compared[rows, where], at = z, 1 / z.shape[2], rows.stop
    loss = DarkReplay(wanted, compared, round_.n + size, s.alpha, heads)
    return Fit([*new, *labelled, *plain], losses=[loss], sampler=Interleaved(n, kinds=2), batch=2 * s.batch_size)


def _said(fitted: Fitted, task: TaskData) -> Tensor:
    """[R, m, C]: the network's logits for these rows."""
    logits: Tensor = outputs(fitted.network, fitted.q.mean, fitted.network.layout, task.x, [task.head], task=task.task)
    return logits


DERPP = Method(
    name="derpp",
    only_classes="it distils class probabilities",
    learn=learn,
    memory=Memory,
    settings={
        **REHEARSAL,
        "alpha": Setting(0.3, "weight of the squared distance from the stored logits", high=1e6),
        "beta": Setting(0.5, "weight of the labels of kept rows", high=1e6),
    },
)
