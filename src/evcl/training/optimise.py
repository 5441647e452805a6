"""The loop over the epochs of one fit, and its steps on a CPU. Those on a GPU are in `graphed.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from evcl._core.devices import limited
from evcl._core.errors import Diverged, EvclError
from evcl._core.randomness import DeviceNoise, GeneratorNoise, HostNoise, Mirrored, Noise, Purpose, generator
from evcl._core.ranks import Ranks
from evcl._core.settings import Settings, decided
from evcl.methods import Fit, Round, Sampler, TaskData, shuffled
from evcl.methods.method import Loss
from evcl.training.data import Pool
from evcl.training.observer import Observer, Position, Progress
from evcl.training.step import Step

SETTLING_EXAMPLES = 2_000  # a mean of x^2 eps^2 over these has a relative standard deviation of 5.5%, and sigma of 2.7%


class Steps(Protocol):
    """How the steps of an epoch are run."""

    number: int

    def epoch(self, epoch: int, batch: int, position: Position | None = None) -> Tensor:
        """One pass over the data, or the rest of one from `position` on; returns the sum of the NLL, [R]."""
        ...


def optimise(
    step: Step,
    steps: Steps,
    length: int,
    s: Settings,
    seeds: Sequence[int],
    stage: int,
    observer: Observer,
    diverged: Tensor | None = None,
) -> None:
    """Train for `s.epochs` epochs, or until an epoch's NLL is below `s.stop_nll` or the observer asks to stop.

    `length` is the number of examples per epoch. If the loss or weights of a replica become NaN or infinite, raise; if
    `diverged` [R] is given, mark the replica there instead. The observer may save the fit in between, and resume it
    from there.
    """
    ranks = step.ranks
    stopped = torch.zeros(len(seeds), dtype=torch.bool, device=step.q.mean.device)
    position = observer.begin_fit(stage, step, stopped, s.epochs, -(-length // s.batch_size))
    if position is not None:
        step.freeze(stopped)
    factor, rate = 1.0, decided(s.get("lr", 1.0))  # a filter has no learning rate
    for epoch in range(0 if position is None else position.epoch, s.epochs):
        observer.begin_epoch(epoch + 1)
        if s.get("lr_schedule") == "cosine":
            factor = 0.5 + 0.5 * math.cos(math.pi * epoch / s.epochs)
            step.scale(factor)
        nll, sound = step.judged(steps.epoch(epoch, s.batch_size, position) / length)
        position = None
        if diverged is not None:
            diverged |= ~sound
        elif not bool(sound.all()):
            names = ", ".join(str(seed) for seed, ok in zip(seeds, sound.tolist(), strict=True) if not ok)
            raise Diverged(
                f"the loss is not a number in epoch {epoch + 1} of {s.epochs} (seed {names}); "
                f"the state from before this task is kept: scale the inputs, or try a smaller lr than {rate}"
            )
        stop = observer.end_epoch(Progress(epoch + 1, s.epochs, nll, step, rate * factor)) is True
        if stop if ranks is None else ranks.first(stop, nll.device):
            return
        if isinstance(s.stop_nll, Tensor) or s.stop_nll > 0:
            stopped |= nll < s.stop_nll.reshape(-1) if isinstance(s.stop_nll, Tensor) else nll < s.stop_nll
            if diverged is not None:
                stopped |= diverged
            if bool(stopped.all()):
                return
            step.freeze(stopped)


def resume_total(total: Tensor, position: Position, ranks: Ranks | None) -> Tensor:
    """Restore an epoch's sum of the NLL, in place; the sum over several processes is kept by the first one."""
    return total.copy_(position.total) if ranks is None or ranks.rank == 0 else total.zero_()


def save_epoch(observer: Observer, ranks: Ranks | None, epoch: int, batches: int, total: Tensor) -> None:
    """At the end of an epoch, save if it is time to. Several processes follow the first one's answer."""
    due = observer.due()
    if due if ranks is None else ranks.first(due, total.device):
        whole = total if ranks is None else ranks.sum_(total.clone())
        observer.save(Position(epoch, batches, whole))


@dataclass
class EagerSteps:
    """Runs steps operation by operation. Every replica has its own generators, so it does not depend on other replicas.

    The order of batches is a function of (seed, `number`, epoch), and so is the noise.
    """

    step: Step
    pool: Pool
    seeds: Sequence[int]
    number: int
    observer: Observer
    sampler: Sampler = shuffled
    noise: Noise | None = None

    def order(self, epoch: int, batch: int) -> Tensor:
        """[R, n]: the positions in the pool of an epoch's examples, in order."""
        sources = [generator(seed, Purpose.ORDER, self.number, epoch) for seed in self.seeds]
        orders = torch.stack([self.sampler(self.pool.sizes, batch, source) for source in sources])
        return self.pool.places(orders).to(self.step.q.mean.device)

    def epoch(self, epoch: int, batch: int, position: Position | None = None) -> Tensor:
        device, seeds, ranks = self.step.q.mean.device, self.seeds, self.step.ranks
        order = self.order(epoch, batch)
        sources = [generator(seed, Purpose.NOISE, self.number, epoch) for seed in seeds]
        noise = self.noise or self._noise(sources, epoch)
        total = torch.zeros(len(seeds), dtype=self.step.q.mean.dtype, device=device)
        done = 0
        if position is not None:
            done = position.batch
            resume_total(total, position, ranks)
            for source, state in zip(sources, position.noise, strict=False):
                source.set_state(state)
        batches = order.split(batch, 1)
        for taken, rows in enumerate(batches[done:], done + 1):
            total.add_(self.step(rows, noise), alpha=rows.shape[1])
            if ranks is None and device.type == "cpu" and self.observer.due():
                self.observer.save(Position(epoch, taken, total, [source.get_state() for source in sources]))
        if ranks is not None or device.type != "cpu":
            save_epoch(self.observer, ranks, epoch, len(batches), total)
        return total

    def settle(self, s: Settings) -> None:
        """Move sigma to its optimum at the end of a fit, if it takes natural steps and the likelihood has a constant
        curvature. The running mean of the curvature is noisy: the error r of an example adds r eps / sigma to it, which
        has mean 0. With a noise and its negative on the same examples, this cancels.
        """
        if not getattr(self.pool.likelihood, "constant_curvature", False):
            return
        order = self.order(s.epochs, s.batch_size)
        order = order.repeat(1, -(-SETTLING_EXAMPLES // order.shape[1]))[:, :SETTLING_EXAMPLES]
        keys = [(seed, Purpose.SETTLING, self.number) for seed in self.seeds]
        one, other = (HostNoise(GeneratorNoise([generator(*key) for key in keys])) for _ in range(2))
        self.pool.following = False
        self.step.settle(order.split(s.batch_size, 1), [one, Mirrored(other)])

    def _noise(self, sources: Sequence[torch.Generator], epoch: int) -> Noise:
        device = self.step.q.mean.device
        if device.type == "cpu":
            return GeneratorNoise(sources)
        if limited(device):
            return HostNoise(GeneratorNoise(sources))
        key = ",".join(map(str, self.seeds))
        return DeviceNoise(generator(0, Purpose.GPU.of(key), self.number, epoch, device=device), torch.empty(0))


def reread_task(fit: Fit, round_: Round, stage: int) -> TaskData | None:
    """The task of a fit whose examples are read anew; None if there is none. Refuse a fit that cannot do that."""
    reread = [task for task in fit.data if task.reread is not None]
    if not reread and (stage > 0 or fit.model is not None):
        return None
    if len(reread) != 1 or fit.data[0] is not reread[0] or round_.ranks is not None:
        why = "several processes share it" if round_.ranks is not None else "it chooses rows of its own to train on"
        raise EvclError(f"examples cannot be read anew in each epoch here, because {why}: leave out reread")
    if any(task.weights is not None for task in fit.data):
        raise EvclError("examples that are read anew in each epoch cannot have weights: leave out reread")
    return reread[0]


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


@dataclass
class RereadSteps(EagerSteps):
    """In each epoch the examples are read into the pool's first rows, as many at a time as there are, and each such
    chunk is trained on as an epoch of its own. If the chunk holds all examples, this is an ordinary epoch.
    """

    losses: Sequence[Loss] = ()
    length: int = 0
    read: Callable[[int], Iterator[tuple[Tensor, Tensor]]] = field(kw_only=True)

    def epoch(self, epoch: int, batch: int, position: Position | None = None) -> Tensor:
        device = self.step.q.mean.device
        total = torch.zeros(len(self.seeds), dtype=self.step.q.mean.dtype, device=device)
        if position is not None:  # checkpoints are only made at the end of an epoch
            return total.copy_(position.total)
        sources = [generator(seed, Purpose.NOISE, self.number, epoch) for seed in self.seeds]
        noise = self.noise or self._noise(sources, epoch)
        window, seen = self.pool.sizes[0], 0
        for k, (x, y) in enumerate(chunks(self.read(epoch), window)):
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
