"""The steps of a fit whose examples are read anew in each epoch, a part of them at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.randomness import Purpose, generator
from evcl.methods import Fit, Reread, Round, TaskData
from evcl.methods.method import Loss
from evcl.training.observer import Position
from evcl.training.optimise import EagerSteps, save_epoch


def reread_task(fit: Fit, round_: Round, stage: int) -> TaskData | None:
    """The task of a fit whose examples are read anew; None if there is none. Refuse a fit that cannot do that."""
    wanted = [task for task in round_.tasks if task.reread is not None]
    found = [task for task in fit.data if task.reread is not None]
    if not wanted or (not found and (stage > 0 or fit.model is not None)):
        return None
    if len(found) != 1 or fit.data[0] is not found[0] or round_.ranks is not None:
        why = "several processes share it" if round_.ranks is not None else "it chooses rows of its own to train on"
        raise EvclError(f"examples cannot be read anew in each epoch here, because {why}: leave out reread")
    if any(task.weights is not None for task in fit.data):
        raise EvclError("examples that are read anew in each epoch cannot have weights: leave out reread")
    return found[0]


def chunks(pieces: Iterator[tuple[Tensor, Tensor]], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of these pieces in chunks of this size; the last may be smaller."""
    x, y = [], []
    count = 0
    for one, labels in pieces:
        while len(one):
            room = size - count
            x.append(one[:room])
            y.append(labels[:room])
            count += len(x[-1])
            one, labels = one[room:], labels[room:]
            if count == size:
                yield torch.cat(x), torch.cat(y)
                x, y, count = [], [], 0
    if count:
        yield torch.cat(x), torch.cat(y)


class RereadSteps(EagerSteps):
    """In each epoch the examples are read into the pool's first rows, as many at a time as there are, and each such
    chunk is trained on as an epoch of its own. If the chunk holds all examples, this is an ordinary epoch.
    """

    reread: Reread
    losses: Sequence[Loss] = ()
    length: int = 0

    def epoch(self, epoch: int, batch: int, position: Position | None = None) -> Tensor:
        device = self.step.q.mean.device
        total = torch.zeros(len(self.seeds), dtype=self.step.q.mean.dtype, device=device)
        if position is not None:  # checkpoints are only made at the end of an epoch
            return total.copy_(position.total)
        sources = [generator(seed, Purpose.NOISE, self.number, epoch) for seed in self.seeds]
        noise = self.noise or self._noise(sources, epoch)
        window, seen = self.pool.sizes[0], 0
        for k, (x, y) in enumerate(chunks(self.reread.read(epoch), window)):
            self.pool.rewrite(x, y)
            for loss in self.losses:
                loss.renew(self.pool.x[:, : len(x)])
            order = self._order(epoch, batch, k, len(x))
            for rows in order.to(device).split(batch, 1):
                total.add_(self.step(rows, noise), alpha=rows.shape[1])
                seen += rows.shape[1]
        if not seen:
            raise EvclError(f"there were no examples to read in epoch {epoch + 1}")
        total.mul_(self.length / seen)  # a loader may drop some examples
        save_epoch(self.observer, self.step.ranks, epoch, -(-self.length // batch), total)
        return total

    def _order(self, epoch: int, batch: int, chunk: int, count: int) -> Tensor:
        """[R, n]: the rows of a chunk of `count` examples, and of the tasks beside it, in the order of their steps."""
        more = (chunk,) if chunk else ()
        sources = [generator(seed, Purpose.ORDER, self.number, epoch, *more) for seed in self.seeds]
        sizes = [count, *self.pool.sizes[1:]]
        order = torch.stack([self.sampler(sizes, batch, source) for source in sources])
        return torch.where(order < count, order, order + self.pool.sizes[0] - count)
