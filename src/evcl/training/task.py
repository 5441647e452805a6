"""One task: its examples, one step on a batch of them, and the loop over epochs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl.errors import Diverged, EvclError
from evcl.methods import Pull, Term, autograd_gradients, collapse
from evcl.nn import BayesianNetwork, Gaussian, Layout
from evcl.randomness import DeviceNoise, GeneratorNoise, Noise, generator
from evcl.settings import Settings
from evcl.training.adam import Adam, fused_update


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
        if network.weights.kernels:
            nll: Tensor = gpu_kernels().MeanNLL.apply(logits, y.flatten(), rows.shape[0])
            return nll
        return F.cross_entropy(logits, y.flatten(), reduction="none").view(rows.shape).mean(1)


@cache
def gpu_kernels() -> Any:
    """The module of Triton kernels; None where there is no Triton."""
    try:
        from evcl.nn import gpu
    except ImportError:
        return None
    return gpu


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """On a GPU: products and convolutions of float32 in TF32, or exactly, for as long as this lasts.

    Torch keeps this for the whole process, so that programs in several threads must all want the same.
    """
    places: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "tf32" if precision == "tf32" else "ieee"
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


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
        stacked: bool = False,
    ) -> None:
        """`stacked`: means and variances in one buffer, for a GPU's kernels."""
        self.pull, self.rest = (None, list(terms)) if reference else collapse(terms)
        if self.pull is not None and not self.pull.finite():
            raise EvclError("the penalty is infinite: a smaller strength, or a larger init_std or prior_std, is needed")
        kernels = gpu_kernels() if stacked and q.mean.dtype == torch.float32 and network.weights.low is None else None
        self.network, self.variance = network, q.variance()
        self.grad_variance: Tensor | None = None
        if kernels is not None and self.variance is not None:
            both, grads = torch.stack([q.mean, self.variance]), q.mean.new_zeros(2, *q.mean.shape)
            q = Gaussian(both[0], q.log_std)
            self.variance, self.grad_mean, self.grad_variance = both[1], grads[0], grads[1]
            network.bind_stacked(both, grads, layout)
        else:
            self.grad_mean = torch.zeros_like(q.mean)
            self.grad_variance = None if q.log_std is None else torch.zeros_like(q.mean)
            network.bind(q.mean, self.variance, layout, (self.grad_mean, self.grad_variance))
        network.weights.kernels = kernels is not None
        for part in (self.pull.mean, self.pull.linear, self.pull.square) if kernels and self.pull else ():
            if part is not None:  # a kernel reads [R, P] numbers of each
                part.w, part.c = part.w.expand_as(q.mean).contiguous(), part.c.expand_as(q.mean).contiguous()
        self.q = q
        self.scratch, self.second = torch.empty_like(q.mean), torch.empty_like(q.mean)
        self.adam_mean = Adam(q.mean, s.lr)
        self.adam_log_std = None if q.log_std is None else Adam(q.log_std, s.lr * s.std_lr_scale)
        self.fused: Callable[..., None] | None = None  # a graph takes no number from the host
        if q.mean.is_cuda and not self.rest:
            self.fused = fused_update if kernels is None else kernels.update
        rates = (s.lr, s.lr * s.get("std_lr_scale", 1.0))
        self.rates = [torch.as_tensor(rate).to(q.mean).expand(len(q.mean), 1).contiguous() for rate in rates]

    def __call__(self, pool: Pool, rows: Tensor, noise: Noise) -> Tensor:
        """Learn from the examples `rows` [R, B]; returns their NLL before the step, [R]."""
        self.network.weights.noise = noise
        with torch.enable_grad():
            nll = pool.nll(self.network, rows)
            nll.sum().backward()
        self.network.collect_gradients()
        if self.fused is not None:
            self._fused_update(self.fused)
        else:
            self._update()
        return nll.detach()

    def _fused_update(self, update: Callable[..., None]) -> None:
        pull = self.pull or Pull()
        springs = [None if part is None else (part.w, part.c) for part in (pull.mean, pull.linear, pull.square)]
        adam = self.adam_mean
        count = adam.count.add_(1)  # of both
        update(adam.weights, adam.first, adam.second, count, self.rates[0], self.grad_mean, None, springs[:1])
        if self.adam_log_std is not None:
            adam = self.adam_log_std
            state = (adam.weights, adam.first, adam.second, count, self.rates[1], self.grad_variance)
            update(*state, self.variance, springs[1:])

    def _update(self) -> None:
        q, extra = self.q, autograd_gradients(self.rest, self.q) if self.rest else (None, None)
        if self.pull is not None:
            self.pull.add_mean_gradient(q.mean, self.grad_mean, self.scratch)
        if extra[0] is not None:
            self.grad_mean += extra[0]
        self.adam_mean.step(self.grad_mean, self.scratch)
        self.grad_mean.zero_()
        if self.adam_log_std is None or self.variance is None or self.grad_variance is None:
            return
        grad = self.grad_variance.mul_(self.variance)  # the chain rule: now of log sigma
        if self.pull is not None:
            self.pull.add_log_std_gradient(self.variance, grad, self.scratch, self.second)
        if extra[1] is not None:
            grad += extra[1]
        self.adam_log_std.step(grad, self.scratch)
        torch.mul(self.adam_log_std.weights, 2, out=self.variance).exp_()
        grad.zero_()

    def buffers(self) -> list[Tensor]:
        """Everything that a step changes."""
        adams = [a for a in (self.adam_mean, self.adam_log_std) if a is not None]
        found = [t for a in adams for t in (a.weights, a.first, a.second, a.count)]
        return [*found, *(t for t in (self.variance, self.grad_mean, self.grad_variance) if t is not None)]

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
    on_gpu = step.q.mean.is_cuda and noise is None
    run: Steps = GraphedSteps(step, pool, seeds, round_) if on_gpu else EagerSteps(step, pool, seeds, round_, noise)
    for epoch in range(s.epochs):
        nll = run.epoch(epoch, s.batch_size) / len(pool)
        if not bool(nll.isfinite().all() & step.sound()):
            finite = zip(seeds, nll.isfinite().tolist(), strict=True)
            lost = [seed for seed, ok in finite if not ok] or list(seeds)
            raise Diverged(
                f"the loss is not a number in epoch {epoch + 1} of {s.epochs} (seed {', '.join(map(str, lost))}); "
                f"the state from before this task is kept: try a smaller lr than {s.lr}"
            )
        if on_epoch is not None:
            on_epoch(Progress(epoch + 1, s.epochs, nll))


class Steps(Protocol):
    """How the steps of an epoch are run."""

    def epoch(self, epoch: int, batch: int) -> Tensor:
        """One pass over the data; returns the sum of the examples' NLL, [R]."""
        ...


class EagerSteps:
    """Operation by operation; every replica has generators of its own, so that it does not depend on its company."""

    def __init__(self, step: Step, pool: Pool, seeds: Sequence[int], round_: int, noise: Noise | None) -> None:
        self.step, self.pool, self.seeds, self.round, self.noise = step, pool, seeds, round_, noise

    def epoch(self, epoch: int, batch: int) -> Tensor:
        device, seeds = self.step.q.mean.device, self.seeds
        orders = [generator(seed, "order", self.round, epoch) for seed in seeds]
        order = torch.stack([torch.randperm(len(self.pool), generator=g) for g in orders]).to(device)
        noise = self.noise or GeneratorNoise(
            [generator(seed, "noise", self.round, epoch, device=device) for seed in seeds]
        )
        total = torch.zeros(len(seeds), dtype=self.step.q.mean.dtype, device=device)
        for rows in order.split(batch, 1):
            total += self.step(self.pool, rows, noise) * rows.shape[1]
        return total


# A capture must not meet another thread's backward pass: autograd has one thread a device for all of them.
capturing = threading.Lock()


class GraphedSteps:
    """On a GPU: a step is captured once for each batch size, and replayed; nothing waits for the host in an epoch.

    One generator draws for all replicas, so that a replica's numbers depend on the seeds beside it.
    """

    def __init__(self, step: Step, pool: Pool, seeds: Sequence[int], round_: int) -> None:
        self.step, self.pool, self.seeds, self.round = step, pool, seeds, round_
        self.generator = generator(0, "gpu", device=step.q.mean.device)
        self.noise = DeviceNoise(self.generator)
        self.total = torch.zeros(len(seeds), dtype=step.q.mean.dtype, device=step.q.mean.device)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def epoch(self, epoch: int, batch: int) -> Tensor:
        key = ",".join(map(str, self.seeds))
        n, r = len(self.pool), len(self.seeds)
        sizes = {min(batch, n), n % batch or min(batch, n)}
        for size in sizes - self.graphs.keys():
            self._capture(size)
        seed = generator(0, f"gpu {key}", self.round, epoch).initial_seed()
        self.generator.manual_seed(seed)
        self.noise.seed.fill_(seed >> 1)
        keys = torch.rand(r, n, device=self.total.device, generator=self.generator)
        order = keys.argsort(1)
        self.total.zero_()
        for rows in order.split(batch, 1):
            graph, static = self.graphs[rows.shape[1]]
            static.copy_(rows)
            graph.replay()
        return self.total

    def _capture(self, size: int) -> None:
        try:
            with capturing:
                self._capture_alone(size)
        except RuntimeError as error:
            raise EvclError(
                "the step cannot be captured as a CUDA graph: a network, layer or term must not wait for the device "
                f"(.item(), boolean indexing); on a CPU it may ({str(error).splitlines()[0]})"
            ) from error

    def _capture_alone(self, size: int) -> None:
        rows = torch.zeros(len(self.seeds), size, dtype=torch.long, device=self.total.device)
        kept = [buffer.clone() for buffer in self.step.buffers()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # what is allocated or chosen at the first calls stays out of the graph
                self.step(self.pool, rows, self.noise)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other programs may run beside this one
            self.noise.seed += 1
            self.total += self.step(self.pool, rows, self.noise) * size
        for buffer, value in zip(self.step.buffers(), kept, strict=True):
            buffer.copy_(value)
        self.graphs[size] = (graph, rows)
