"""One task: its examples, one step on a batch of them, and the loop over epochs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl.errors import Diverged, EvclError
from evcl.methods import Term, autograd_gradients, collapse
from evcl.nn import BayesianNetwork, Gaussian, Layout
from evcl.randomness import GeneratorNoise, Noise, generator
from evcl.settings import Settings
from evcl.training.adam import Adam


@dataclass(frozen=True)
class TaskData:
    """x [R, N, ...] and y [R, N], or with a first axis of 1 where all replicas share the data."""

    x: Tensor
    y: Tensor  # positions among the head's classes
    head: int

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The examples `rows` [R, B], replica by replica: [R, B, ...] and [R, B]."""
        if self.x.shape[0] == 1:
            flat = rows.flatten()
            x, y = self.x[0].index_select(0, flat), self.y[0].index_select(0, flat)
            return x.unflatten(0, rows.shape), y.view(rows.shape)
        replica = torch.arange(len(rows), device=rows.device).unsqueeze(1)
        return self.x[replica, rows], self.y[replica, rows]


class Pool:
    """The examples of one round of training: one task's or, jointly, several tasks', each through its own head."""

    def __init__(self, tasks: Sequence[TaskData], classes: Callable[[int], int]) -> None:
        self.heads = sorted({task.head for task in tasks})
        starts, total = {}, 0
        for k in self.heads:
            starts[k] = total
            total += classes(k)
        y = torch.cat([task.y + starts[task.head] for task in tasks], 1)
        x = tasks[0].x if len(tasks) == 1 else torch.cat([task.x for task in tasks], 1)
        self.data = TaskData(x, y, -1)
        self.head_of: Tensor | None = None
        if len(self.heads) > 1:
            sizes = torch.tensor([task.y.shape[1] for task in tasks])
            which = torch.tensor([self.heads.index(task.head) for task in tasks])
            self.head_of = which.repeat_interleave(sizes).to(y.device)
            self.foreign = torch.ones(len(self.heads), total, dtype=torch.bool, device=y.device)
            for i, k in enumerate(self.heads):
                self.foreign[i, starts[k] : starts[k] + classes(k)] = False

    def __len__(self) -> int:
        return self.data.y.shape[1]

    def nll(self, network: BayesianNetwork, rows: Tensor) -> Tensor:
        """[R]: the mean negative log-likelihood of the examples `rows` [R, B]."""
        x, y = self.data.take(rows)
        logits = network.logits(x.flatten(0, 1), self.heads)
        if self.head_of is not None:  # an example's classes are those of its own head
            logits = logits.masked_fill(self.foreign[self.head_of[rows.flatten()]], -torch.inf)
        return F.cross_entropy(logits, y.flatten(), reduction="none").view(rows.shape).mean(1)


class Step:
    """One step of training: NLL by autograd, the method's terms in closed form, Adam, all on flat buffers.

    `reference` sends the method's terms through autograd instead: slow, obvious, for the tests.
    """

    def __init__(
        self,
        network: BayesianNetwork,
        layout: Layout,
        q: Gaussian,
        terms: Sequence[Term],
        s: Settings,
        reference: bool = False,
    ) -> None:
        self.network, self.q = network, q
        self.pull, self.rest = (None, list(terms)) if reference else collapse(terms)
        if self.pull is not None and not self.pull.finite():
            raise EvclError("the penalty is infinite: a smaller strength, or a larger init_std or prior_std, is needed")
        self.variance = q.variance()
        self.grad_mean, self.scratch = torch.zeros_like(q.mean), torch.empty_like(q.mean)
        self.grad_variance = None if q.log_std is None else torch.zeros_like(q.mean)
        network.bind(q.mean, self.variance, layout, (self.grad_mean, self.grad_variance))
        self.adam_mean = Adam(q.mean, s.lr)
        if q.log_std is not None:
            self.adam_log_std = Adam(q.log_std, s.lr * s.std_lr_scale)

    def __call__(self, pool: Pool, rows: Tensor, noise: Noise) -> Tensor:
        """Learn from the examples `rows` [R, B]; returns their NLL before the step, [R]."""
        q = self.q
        if q.log_std is not None:
            torch.mul(q.log_std, 2, out=self.variance).exp_()
        self.network.weights.noise = noise
        with torch.enable_grad():
            nll = pool.nll(self.network, rows)
            nll.sum().backward()
        self.network.collect_gradients()
        extra = autograd_gradients(self.rest, q) if self.rest else None
        if self.pull is not None:
            self.pull.add_mean_gradient(q.mean, self.grad_mean, self.scratch)
        if extra is not None:
            self.grad_mean += extra[0]
        self.adam_mean.step(self.grad_mean, self.scratch)
        self.grad_mean.zero_()
        if q.log_std is not None and self.variance is not None and self.grad_variance is not None:
            grad = self.grad_variance.mul_(self.variance).mul_(2)  # the chain rule: now of log sigma
            if self.pull is not None:
                self.pull.add_log_std_gradient(self.variance, grad, self.scratch)
            if extra is not None and extra[1] is not None:
                grad += extra[1]
            self.adam_log_std.step(grad, self.scratch)
            grad.zero_()
        return nll.detach()

    def sound(self) -> Tensor:
        """Whether every mean is finite, and every variance finite and above 0."""
        sound = self.q.mean.isfinite().all()
        variance = self.q.variance()
        return sound if variance is None else sound & variance.isfinite().all() & (variance > 0).all()


@dataclass(frozen=True)
class Progress:
    """Reported at the end of each epoch."""

    epoch: int  # from 1
    epochs: int
    nll: Tensor  # [R], the mean over the epoch


OnEpoch = Callable[[Progress], None]


def optimise(
    step: Step,
    pool: Pool,
    s: Settings,
    seeds: Sequence[int],
    round_: int,
    noise: Noise | None = None,
    on_epoch: OnEpoch | None = None,
) -> None:
    """Train for `s.epochs` epochs. The order of batches is a function of (seed, round, epoch); so is the noise."""
    device = step.q.mean.device
    for epoch in range(s.epochs):
        orders = [torch.randperm(len(pool), generator=generator(seed, "order", round_, epoch)) for seed in seeds]
        order = torch.stack(orders).to(device)
        source = noise or GeneratorNoise([generator(seed, "noise", round_, epoch, device=device) for seed in seeds])
        total = order.new_zeros(len(seeds), dtype=step.q.mean.dtype)
        for rows in order.split(s.batch_size, 1):
            total += step(pool, rows, source) * rows.shape[1]
        nll = total / len(pool)
        if not bool(nll.isfinite().all() & step.sound()):
            lost = [seed for seed, ok in zip(seeds, nll.isfinite().tolist(), strict=True) if not ok] or list(seeds)
            raise Diverged(
                f"the loss is not a number in epoch {epoch + 1} of {s.epochs} (seed {', '.join(map(str, lost))}); "
                f"the state from before this task is kept: try a smaller lr than {s.lr}"
            )
        if on_epoch is not None:
            on_epoch(Progress(epoch + 1, s.epochs, nll))
