"""One task: its examples, one step on a batch of them, and the loop over epochs."""

from __future__ import annotations

import math
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
from evcl.methods import KL, Elastic, Term
from evcl.nn import BayesianNetwork, Gaussian, Layout
from evcl.nn.chain import Batch, Chain, Names, find_places, foreign
from evcl.randomness import DeviceNoise, GeneratorNoise, Noise, PartNoise, generator
from evcl.ranks import Ranks
from evcl.settings import Settings
from evcl.training.update import Update, gpu_kernels
from evcl.training.watch import Mark, Watch


@dataclass(frozen=True)
class TaskData:
    """x [U, N, ...] and y [U, N]: replica r learns from row r mod U, so that U = 1 is data that all of them share."""

    x: Tensor
    y: Tensor  # positions among the head's classes
    head: int
    weights: Tensor | None = None  # [U, N], what an example counts for: 1 on average; None: 1 each

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The examples `rows` [R, B], replica by replica: [R, B, ...] and [R, B]."""
        if self.x.shape[0] == 1:
            flat = rows.flatten()
            x, y = self.x[0].index_select(0, flat), self.y[0].index_select(0, flat)
            return x.unflatten(0, rows.shape), y.view(rows.shape)
        own = (torch.arange(len(rows), device=rows.device) % len(self.x)).unsqueeze(1)
        return self.x[own, rows], self.y[own, rows]

    def take_weights(self, rows: Tensor) -> Tensor | None:
        """[R, B]: what the examples `rows` [R, B] count for."""
        if self.weights is None:
            return None
        own = (torch.arange(len(rows), device=rows.device) % len(self.weights)).unsqueeze(1)
        return self.weights[own, rows]


class Pool:
    """The examples of one round of training: one task's or, jointly, several tasks', each through its own head."""

    def __init__(self, tasks: Sequence[TaskData], classes: Callable[[int], int]) -> None:
        self.heads = sorted({task.head for task in tasks})
        starts, total = {}, 0
        for k in self.heads:
            starts[k] = total
            total += classes(k)
        self.classes = total
        self.x = tasks[0].x if len(tasks) == 1 else torch.cat([task.x for task in tasks], 1)
        self.y = torch.cat([task.y + starts[task.head] for task in tasks], 1)
        self.weights: Tensor | None = None
        if any(task.weights is not None for task in tasks):
            counts = [torch.ones_like(t.y, dtype=t.x.dtype) if t.weights is None else t.weights for t in tasks]
            self.weights = torch.cat(counts, 1)
        self.columns: Tensor | None = None
        if len(self.heads) > 1:  # an example's classes are those of its own head
            own = [(starts[task.head], starts[task.head] + classes(task.head)) for task in tasks]
            sizes = torch.tensor([task.y.shape[1] for task in tasks])
            self.columns = torch.tensor(own).repeat_interleave(sizes, 0).to(self.y.device)

    def __len__(self) -> int:
        return self.y.shape[1]

    def nll(self, network: BayesianNetwork, rows: Tensor) -> Tensor:
        """[R]: the mean negative log-likelihood of the examples `rows` [R, B], each times what it counts for."""
        data = TaskData(self.x, self.y, -1, self.weights)
        (x, y), weights = data.take(rows), data.take_weights(rows)
        logits = network.logits(x.flatten(0, 1), self.heads)
        if self.columns is not None:
            logits = logits.masked_fill(foreign(self.columns[rows.flatten()], logits.shape[1]), -torch.inf)
        nll = F.cross_entropy(logits, y.flatten(), reduction="none").view(rows.shape)
        return nll.mean(1) if weights is None else (weights * nll).mean(1)


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


class ByAutograd:
    """The gradients of any network: `Chain`'s task, for networks that are none."""

    def __init__(self, network: BayesianNetwork, layout: Layout, values: Tensor, grads: Tensor, pool: Pool) -> None:
        self.network, self.pool, self.layout, self.values, self.grads = network, pool, layout, values, grads
        self.bound: object = None

    def __call__(self, rows: Tensor, noise: Noise) -> Tensor:
        if self.network.weights.mean is not self.bound:  # at first, and when something was predicted in between
            values, grads, both = self.values, self.grads, len(self.values) == 2
            into = grads[0], grads[1] if both else None
            self.network.bind(values[0], values[1] if both else None, self.layout, into)
            self.bound = self.network.weights.mean
        self.network.weights.noise = noise
        self.grads.zero_()
        with torch.enable_grad():
            nll = self.pool.nll(self.network, rows)
            nll.sum().backward()
        self.network.collect_gradients()
        return nll.detach()


class Shared:
    """Gradients of which this process computes its part: of its examples of a batch, added up over all processes."""

    def __init__(self, gradients: Callable[[Tensor, Noise], Tensor], grads: Tensor, ranks: Ranks) -> None:
        self.gradients, self.grads, self.ranks = gradients, grads, ranks

    def __call__(self, rows: Tensor, noise: Noise) -> Tensor:
        """Returns this process's share of the batch's mean NLL, [R]."""
        count = rows.shape[1]
        part = self.ranks.part(count)
        share = (part.stop - part.start) / count
        if share == 0:  # of a last batch that is smaller than the processes are many: it draws, and counts for nothing
            part = slice(0, 1)
        nll = self.gradients(rows[:, part], PartNoise(noise, part, count))
        nll, grads = (nll * share, self.grads.mul_(share)) if share else (torch.zeros_like(nll), self.grads.zero_())
        self.ranks.sum_(grads)
        return nll


class Step:
    """One step of training: the NLL's gradients, the method's terms in closed form, Adam, all on flat buffers.

    `chain` names the network's layers if it is one. `reference` sends the method's terms through autograd instead:
    slow, obvious, for the tests.
    """

    def __init__(
        self,
        network: BayesianNetwork,
        layout: Layout,
        q: Gaussian,
        terms: Sequence[Term],
        s: Settings,
        pool: Pool,
        chain: Names | None = None,
        reference: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        variance = q.variance()
        values = torch.stack([q.mean] if variance is None else [q.mean, variance])
        grads = torch.zeros_like(values)
        self.q, self.pool, self.terms = Gaussian(values[0], q.log_std), pool, list(terms)
        kernels: Any = gpu_kernels() if values.is_cuda and values.dtype == torch.float32 else None
        self.gradients: Callable[[Any, Noise], Tensor]
        low, copy = network.weights.low, None
        self.statistics = list(network.statistics().values())
        self.by_kernels = kernels is not None and chain is not None and pool.classes <= kernels.MOST_CLASSES
        self.by_kernels = self.by_kernels and pool.weights is None  # which the kernels do not know
        if chain is None or (values.is_cuda and not self.by_kernels):
            self.gradients = ByAutograd(network, layout, values, grads, pool)
        elif self.by_kernels:
            copy = None if low is None else values.to(low)
            places = find_places(chain, layout, pool.heads)
            self.gradients = kernels.Chain(places, values if copy is None else copy, grads, pool)
        else:
            self.gradients = Chain(find_places(chain, layout, pool.heads), values, grads, pool, low)
        if ranks is not None:
            self.gradients = Shared(self.gradients, grads, ranks)
        self.ranks = ranks
        self.update = Update(self.q, None if variance is None else values[1], grads, terms, s, reference, copy)

    def __call__(self, rows: Tensor | Batch, noise: Noise) -> Tensor:
        """Learn from the examples `rows` [R, B], or a batch if it is `by_kernels`; returns their NLL before the step,
        [R], valid until the next.
        """
        nll = self.gradients(rows, noise)
        self.update()
        return nll

    def losses(self) -> dict[str, Tensor]:
        """[R] each: the method's terms as they are now; with the mean NLL they add up to the objective."""
        found = {kind: torch.zeros_like(self.q.mean[:, 0]) for kind in ("kl", "elastic", "other")}
        for term in self.terms:
            kind = "kl" if isinstance(term, KL) else "elastic" if isinstance(term, Elastic) else "other"
            found[kind] = found[kind] + term.loss(self.q)
        return found

    def buffers(self) -> list[Tensor]:
        """Everything that a step changes."""
        return [*self.update.buffers(), *self.statistics]

    def judged(self, nll: Tensor) -> tuple[Tensor, Tensor]:
        """An epoch's NLL [R], of all processes that share it, and whether it and the weights are sound [R].

        That is: every mean is finite, and every variance finite and above 0. What one process lost is lost in all.
        """
        sound = nll.isfinite() & self.q.mean.isfinite().all(1)
        variance = self.q.variance()
        if variance is not None:
            sound &= variance.isfinite().all(1) & (variance > 0).all(1)
        if self.ranks is None:
            return nll, sound
        nll, unsound = self.ranks.sum_(torch.stack([nll, (~sound).to(nll)]))
        return nll, unsound == 0


@dataclass(frozen=True)
class Progress:
    """Reported at the end of each epoch."""

    epoch: int  # from 1
    epochs: int
    nll: Tensor  # [R], the mean over the epoch
    step: Step  # the weights and terms as they are now
    lr: Tensor | float
    validation: tuple[Tensor, Tensor] | None = None  # [R] each: NLL and accuracy on a part held out
    tuning: bool = False  # on coresets


OnBegin = Callable[[int], None]  # an epoch begins, from 1
OnEpoch = Callable[[Progress], bool | None]  # it has ended; True: it was the last one


def optimise(
    step: Step,
    pool: Pool,
    s: Settings,
    seeds: Sequence[int],
    round_: int,
    noise: Noise | None = None,
    on_epoch: OnEpoch | None = None,
    lost: Tensor | None = None,
    on_begin: OnBegin | None = None,
    watch: Watch | None = None,
) -> None:
    """Train for `s.epochs` epochs, or until an epoch's NLL is below `s.stop_nll` or `on_epoch` says that it is enough.

    The order of batches is a function of (seed, round, epoch); so is the noise. A replica whose loss or weights are no
    numbers is an error, or is marked in `lost` [R]. `watch` may save it on the way; it then goes on from there.
    """
    ranks = step.ranks
    on_gpu = step.q.mean.is_cuda and noise is None and ranks is None
    if on_gpu:
        run: Steps = GraphedSteps(step, pool, seeds, round_, watch)
    else:
        run = EagerSteps(step, pool, seeds, round_, noise, watch)
    sure = torch.zeros(len(seeds), dtype=torch.bool, device=step.q.mean.device)
    mark = None if watch is None else watch.begin(step, sure, s.epochs, -(-len(pool) // s.batch_size))
    if mark is not None:
        step.update.freeze(sure)
    factor = 1.0
    for epoch in range(0 if mark is None else mark.epoch, s.epochs):
        if on_begin is not None:
            on_begin(epoch + 1)
        if s.lr_schedule == "cosine":
            factor = 0.5 + 0.5 * math.cos(math.pi * epoch / s.epochs)
            step.update.scale(factor)
        nll, sound = step.judged(run.epoch(epoch, s.batch_size, mark) / len(pool))
        mark = None
        if lost is not None:
            lost |= ~sound
        elif not bool(sound.all()):
            names = ", ".join(str(seed) for seed, ok in zip(seeds, sound.tolist(), strict=True) if not ok)
            raise Diverged(
                f"the loss is not a number in epoch {epoch + 1} of {s.epochs} (seed {names}); "
                f"the state from before this task is kept: try a smaller lr than {s.lr}"
            )
        stop = on_epoch is not None and on_epoch(Progress(epoch + 1, s.epochs, nll, step, s.lr * factor)) is True
        if stop if ranks is None else ranks.first(stop, nll.device):
            return
        if isinstance(s.stop_nll, Tensor) or s.stop_nll > 0:
            sure |= nll < s.stop_nll.reshape(-1) if isinstance(s.stop_nll, Tensor) else nll < s.stop_nll
            if lost is not None:
                sure |= lost
            if bool(sure.all()):
                return
            step.update.freeze(sure)


class Steps(Protocol):
    """How the steps of an epoch are run."""

    def epoch(self, epoch: int, batch: int, mark: Mark | None = None) -> Tensor:
        """One pass over the data, or what is left of it from `mark` on; returns the sum of the examples' NLL, [R]."""
        ...


class EagerSteps:
    """Operation by operation; every replica has generators of its own, so that it does not depend on its company."""

    def __init__(
        self, step: Step, pool: Pool, seeds: Sequence[int], round_: int, noise: Noise | None, watch: Watch | None = None
    ) -> None:
        if noise is not None and watch is not None:
            raise ValueError("noise that is handed in cannot be saved")
        self.step, self.pool, self.seeds, self.round, self.noise, self.watch = step, pool, seeds, round_, noise, watch

    def epoch(self, epoch: int, batch: int, mark: Mark | None = None) -> Tensor:
        device, seeds = self.step.q.mean.device, self.seeds
        orders = [generator(seed, "order", self.round, epoch) for seed in seeds]
        order = torch.stack([torch.randperm(len(self.pool), generator=g) for g in orders]).to(device)
        sources = [generator(seed, "noise", self.round, epoch) for seed in seeds]
        noise = self.noise or self._noise(sources, epoch)
        total = torch.zeros(len(seeds), dtype=self.step.q.mean.dtype, device=device)
        done = 0
        if mark is not None:
            done = mark.batch
            total.copy_(mark.total)
            for source, state in zip(sources, mark.noise, strict=False):
                source.set_state(state)
        for taken, rows in enumerate(order.split(batch, 1)[done:], done + 1):
            total.add_(self.step(rows, noise), alpha=rows.shape[1])
            if self.watch is not None and self.watch.due():
                self.watch.save(Mark(epoch, taken, total, [source.get_state() for source in sources]))
        return total

    def _noise(self, sources: Sequence[torch.Generator], epoch: int) -> Noise:
        device = self.step.q.mean.device
        if device.type == "cpu":
            return GeneratorNoise(sources)
        key = ",".join(map(str, self.seeds))
        return DeviceNoise(generator(0, f"gpu {key}", self.round, epoch, device=device), torch.empty(0))


class Streams(threading.local):
    """A thread's own two streams, made once: torch hands out 32 and then the same ones again, and what another thread
    runs on a stream that is being captured becomes part of that graph.
    """

    def __init__(self) -> None:
        self.run, self.capture = torch.cuda.Stream(), torch.cuda.Stream()


@cache
def streams() -> Streams:
    return Streams()


MANY = 10  # steps in one graph: what lies between two graphs takes as long as a kernel
# A capture must not meet another thread's backward pass: autograd has one thread a device for all of them.
capturing = threading.Lock()


class GraphedSteps:
    """On a GPU: steps are captured as graphs, and replayed; nothing waits for the host in an epoch.

    There are three graphs: of many full batches, of one, and of the last one, which may be smaller. The order of an
    epoch is a seed's own; so is the noise, where kernels draw it (see `DeviceNoise`): replicas of one seed see the same
    batches and the same noise, whatever is beside them.
    """

    def __init__(self, step: Step, pool: Pool, seeds: Sequence[int], round_: int, watch: Watch | None = None) -> None:
        self.step, self.seeds, self.round, self.watch = step, seeds, round_, watch
        device = step.q.mean.device
        self.distinct = seeds[: period(seeds)]
        self.generator = generator(0, "gpu", device=device)
        keys = [generator(seed, "noise", round_).initial_seed() for seed in self.distinct]
        self.noise = DeviceNoise(self.generator, torch.tensor(keys, device=device))
        self.total = torch.zeros(len(seeds), dtype=step.q.mean.dtype, device=device)
        self.order = torch.zeros(len(self.distinct), len(pool), dtype=torch.long, device=device)
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}

    def epoch(self, epoch: int, batch: int, mark: Mark | None = None) -> Tensor:
        if mark is not None:  # made at its end
            return self.total.copy_(mark.total)
        full, rest = divmod(self.order.shape[1], batch)
        plan = [((batch, MANY), full // MANY), ((batch, 1), full % MANY), ((rest, 1), int(rest > 0))]
        for (size, steps), times in plan:
            if times and (size, steps) not in self.graphs:
                count = self.step.update.count
                one = Batch(self.order, count, full + int(rest > 0), batch, size, self.total)
                self.graphs[size, steps] = self._capture(one, steps)
        key = ",".join(map(str, self.seeds))
        self.generator.manual_seed(generator(0, f"gpu {key}", self.round, epoch).initial_seed())
        keys = torch.empty(self.order.shape, device=self.total.device)
        for row, seed in zip(keys, self.distinct, strict=True):
            row.uniform_(generator=generator(seed, "order", self.round, epoch, device=row.device))
        self.order.copy_(keys.argsort(dim=1, stable=True))
        self.total.zero_()
        for shape, times in plan:
            for _ in range(times):
                self.graphs[shape].replay()
        if self.watch is not None and self.watch.due():
            self.watch.save(Mark(epoch, full + int(rest > 0), self.total))
        return self.total

    def _capture(self, batch: Batch, steps: int) -> torch.cuda.CUDAGraph:
        try:
            with capturing:
                return self._capture_alone(batch, steps)
        except RuntimeError as error:
            raise EvclError(
                "the step cannot be captured as a CUDA graph: a network, layer or term must not wait for the device "
                f"(.item(), boolean indexing); on a CPU it may ({str(error).splitlines()[0]})"
            ) from error

    def _capture_alone(self, batch: Batch, steps: int) -> torch.cuda.CUDAGraph:
        buffers = self.step.buffers()
        kept = [buffer.clone() for buffer in buffers]

        def once() -> None:
            if self.step.by_kernels:
                self.step(batch, self.noise)
            else:
                self.total.add_(self.step(batch.rows(), self.noise), alpha=batch.size)

        def go_back() -> None:
            for buffer, value in zip(buffers, kept, strict=True):
                buffer.copy_(value)

        stream = streams().capture
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # what is allocated or chosen at the first calls stays out of the graph
                once()
                go_back()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):  # other programs run on
            for _ in range(steps):
                once()
        return graph


def period(seeds: Sequence[int]) -> int:
    """The shortest piece of which the seeds are repetitions."""
    count = len(seeds)
    return next(v for v in range(1, count + 1) if count % v == 0 and list(seeds[:v]) * (count // v) == list(seeds))
