"""One step: the gradients of the NLL, of losses on the network and of the method's terms; then the update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.randomness import Noise, PartNoise
from evcl._core.ranks import Ranks
from evcl._core.settings import Settings
from evcl.methods import Fit, Gradients, LogitLoss, Loss, collapse
from evcl.methods.applied import add_gradients, begin_tracker, term_name
from evcl.nn import BayesianNetwork, Gaussian, Layout, Part
from evcl.nn.chain import Batch, Chain, LayerNames, find_places
from evcl.nn.film import scale_and_shift
from evcl.training.data import Pool, all_heads, find_lessons
from evcl.training.per_task import TaskFit
from evcl.training.rules import Estimating, Natural, Rule, Update, gpu_kernels


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Choose TF32 or full precision for float32 matrix products and convolutions on a GPU, inside this context.

    This is a global setting of torch, so programs in several threads must all use the same.
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


Source = Callable[[Any, Noise], Tensor]  # (rows [R, B] or a Batch, noise) -> NLL [R]; the gradient is in its buffer


class Bound:
    """A network bound to a step's buffers, to which it adds the gradients that autograd computes."""

    def __init__(
        self, network: BayesianNetwork, layout: Layout, values: Tensor, grads: Tensor, task_fit: TaskFit | None = None
    ) -> None:
        self.network, self.layout, self.values, self.grads = network, layout, values, grads
        self.task_fit = task_fit
        self.bound: object = None

    def film_of(self, chain: LayerNames, task: int) -> list[tuple[Tensor, ...]]:
        """For each layer of a chain, this task's FiLM scale and shift and, if they are trained, their gradients."""
        weights = self.network.task_weights
        if weights is None:  # private layers are no chain
            return []
        row, grads = (weights.table[:, task], None) if self.task_fit is None else self.task_fit.rows.row(task)
        both = [row] if grads is None else [row, grads]
        sites = weights.kind.parts
        return [tuple(t for each in both for t in scale_and_shift(each, sites[weight])) for weight, _ in chain]

    def backward(self, noise: Noise, compute: Callable[[BayesianNetwork], list[Tensor]]) -> list[Tensor]:
        """Call `compute`, add the gradient of the sum of its results ([R] each) to the buffer, and return them."""
        if self.network.weights.mean is not self.bound:  # on the first call, and after a prediction in between
            values, grads, both = self.values, self.grads, len(self.values) == 2
            into = grads[0], grads[1] if both else None
            rows = None if self.task_fit is None else self.task_fit.rows
            self.network.bind(values[0], values[1] if both else None, self.layout, into, rows)
            self.bound = self.network.weights.mean
        self.network.weights.noise = noise
        with torch.enable_grad():
            losses = compute(self.network)
            total = torch.stack(losses).sum()
            if total.requires_grad:
                total.backward()
        self.network.collect_gradients()
        if self.task_fit is not None:
            self.task_fit.rows.collect()
        return [one.detach() for one in losses]


class ByAutograd:
    """The gradient of any network's NLL and of losses on the network, which share a pass through its trunk.

    If the network is a chain, `chain` computes the NLL and any distillation faster, and only other losses are added.
    """

    def __init__(self, bound: Bound, pool: Pool, losses: Sequence[Loss] = (), chain: Source | None = None) -> None:
        self.bound, self.pool, self.losses, self.chain = bound, pool, losses, chain
        self.values = [bound.values.new_zeros(bound.values.shape[1]) for _ in losses]  # [R] each, of the last step

    def __call__(self, rows: Tensor | Batch, noise: Noise) -> Tensor:
        self.bound.grads.zero_()  # a chain only writes the gradients of its own layers
        if self.bound.task_fit is not None:
            self.bound.task_fit.grads.zero_()
        nll = None if self.chain is None else self.chain(rows, noise)
        rows = rows.rows() if isinstance(rows, Batch) else rows
        batch = self.pool.minibatch(rows, noise, bool(self.losses))

        def compute(network: BayesianNetwork) -> list[Tensor]:
            if nll is not None:
                return [loss(network, batch) for loss in self.losses]
            for loss in self.losses:
                loss.prepare(network, batch)
            with network.using(self.pool.task(rows)):
                features = batch.through(network).unflatten(0, rows.shape)
            complete = batch._replace(features=features)
            return [*(loss(network, complete) for loss in self.losses), self.pool.nll(network, rows, complete)]

        losses = self.bound.backward(noise, compute)
        for value, one in zip(self.values, losses, strict=False):
            value.copy_(one)
        return losses[-1] if nll is None else nll


class Apart:
    """The gradient of every second row of a batch, the new ones, and in a buffer of its own that of the others, the
    kept ones. `Step` projects the first with the second.
    """

    def __init__(self, new: Source, kept: Source) -> None:
        self.new, self.kept = new, kept

    def __call__(self, rows: Tensor, noise: Noise) -> Tensor:
        """Return the mean NLL of all rows, [R]."""
        if isinstance(noise, PartNoise):
            noise = PartNoise(noise.noise, slice(noise.part.start // 2, noise.part.stop // 2), noise.examples // 2)
        kept = self.kept(rows[:, 1::2], noise).clone()  # first: both may use one buffer for the weights of tasks
        return (kept + self.new(rows[:, ::2], noise)) / 2


def apart(new: Source, bound: Bound, pool: Pool, into: Tensor) -> Apart:
    """The source `new` for the new rows, and one like it for the kept rows, which writes into another buffer."""
    kept: Source = ByAutograd(Bound(bound.network, bound.layout, bound.values, into, bound.task_fit), pool)
    if isinstance(new, Chain):
        kept = Chain(new.places, bound.values, into, pool, bound.network.weights.compute_dtype)
    return Apart(new, kept)


def project_(gradient: Tensor, kept: Tensor) -> None:
    """A-GEM (Chaudhry et al., 2019), in place: g <- g - min(0, g.k / k.k) k for each replica. g is the gradient of the
    new rows and k that of the kept ones: afterwards, a small step against g does not increase the loss of the kept.
    """
    against = torch.linalg.vecdot(gradient, kept).clamp_max(0) / torch.linalg.vecdot(kept, kept).clamp_min(1e-30)
    gradient.addcmul_(kept, -against.unsqueeze(1))


class Shared:
    """A gradient shared by processes: each computes that of its part of the batch, and all are summed. The parts begin
    at multiples of `period`.
    """

    def __init__(self, source: Source, grads: Sequence[Tensor], ranks: Ranks, period: int = 1) -> None:
        self.source, self.grads, self.ranks, self.period = source, grads, ranks, period

    def __call__(self, rows: Tensor, noise: Noise) -> Tensor:
        """Return this process's share of the batch's mean NLL, [R]."""
        count, period = rows.shape[1], self.period
        part = self.ranks.part(-(-count // period))
        part = slice(min(count, part.start * period), min(count, part.stop * period))
        share = (part.stop - part.start) / count
        if share == 0:  # the last batch has fewer examples than processes: draw the noise, but contribute 0
            part = slice(0, min(count, period))
        nll = self.source(rows[:, part], PartNoise(noise, part, count))
        for grads in self.grads:
            self.ranks.sum_(grads.mul_(share) if share else grads.zero_())
        return nll * share if share else torch.zeros_like(nll)


class Accumulated:
    """A gradient computed in `parts`: the mean over equal parts of the batch, one after another, so that each needs
    only a fraction of the memory. Every part draws its own noise, and the parts begin at multiples of `period`.
    """

    def __init__(self, source: Source, grads: Sequence[Tensor], parts: int, period: int = 1) -> None:
        self.source, self.grads, self.parts, self.period = source, grads, parts, period
        self.sums = [torch.zeros_like(one) for one in grads]

    def __call__(self, rows: Tensor, noise: Noise) -> Tensor:
        count = rows.shape[1]
        size = -(-count // (self.parts * self.period)) * self.period
        if size >= count:
            return self.source(rows, noise)
        nll = rows.new_zeros(len(rows), dtype=self.grads[0].dtype)
        for one in self.sums:
            one.zero_()
        for start in range(0, count, size):
            stop = min(count, start + size)
            share = (stop - start) / count
            nll = nll + share * self.source(rows[:, start:stop], noise)
            for one, grads in zip(self.sums, self.grads, strict=True):
                one.add_(grads, alpha=share)
        for one, grads in zip(self.sums, self.grads, strict=True):
            grads.copy_(one)
        return nll


@dataclass(frozen=True)
class Execution:
    """How a run computes its steps, whatever they compute.

    Attributes:
        ranks: the processes that share each step; None: this one alone
        accumulate: the number of parts in which the gradient is computed
        noise: a noise source in place of the run's own, for tests
        reference: differentiate the method's terms by autograd: slow and simple, for tests
    """

    ranks: Ranks | None = None
    accumulate: int = 1
    noise: Noise | None = None
    reference: bool = False


class Step:
    """One training step on flat buffers. `buffers()` returns every tensor that a step changes.

    `q`, with its layout, and the terms and `moves` of `fit` are those of the fit's weights alone. `chain` names the
    network's layers if their gradient is not to be computed by autograd, but by nn/chain.py or, on a GPU, by kernels.
    `task_fit`: the weights of tasks to train beside the posterior.
    """

    def __init__(
        self,
        network: BayesianNetwork,
        q: Gaussian,
        fit: Fit,
        s: Settings,
        pool: Pool,
        chain: LayerNames | None = None,
        task_fit: TaskFit | None = None,
        how: Execution | None = None,
    ) -> None:
        how, layout, variance = how or Execution(), q.layout, q.variance()
        assert layout is not None
        values = torch.stack([q.mean] if variance is None else [q.mean, variance])
        grads = torch.zeros_like(values)
        self.q, self.network, self.pool = Gaussian(values[0], q.log_std, layout), network, pool
        self.terms, self.trackers = list(fit.terms), list(fit.trackers)
        self.ranks, self.task_fit = how.ranks, task_fit
        self.statistics = list(network.statistics().values())
        pull, self.rest = (None, self.terms) if how.reference else collapse(self.terms)
        self.variance = None if variance is None else values[1]
        self.grads = Gradients(grads[0], None if variance is None else grads[1], layout)
        self.by_kernels = chain is not None and values.is_cuda
        self._losses: list[tuple[str, Tensor]] = []  # [R] each, of the last step
        self._values, self._rounded = values, None if not self.by_kernels else _rounded(network, values)
        bound = Bound(network, layout, values, grads, task_fit)
        source = self._gradient(chain, bound, fit.losses)
        self.kept_grads = torch.zeros_like(grads) if fit.project else None
        if self.kept_grads is not None:
            source = apart(source, bound, pool, self.kept_grads)
        make = fit.rule or Update
        self.update: Rule = make(self.q, self.variance, grads, pull, s, self._rounded)
        self.estimating = self.update if isinstance(self.update, Estimating) else None
        if self.estimating is not None:
            self.by_kernels = False
            if how.accumulate > 1 and getattr(self.estimating, "whole", False):
                raise EvclError("this method needs all examples of a step at once: leave out accumulate")
            source = self.estimating.source(network, layout, pool, self._at(chain, fit.losses))
        shared = [grads] if self.estimating is None else [grads, *self.estimating.means]
        shared += [] if self.kept_grads is None else [self.kept_grads]
        self.rules: list[Rule | TaskFit] = [self.update]
        if task_fit is not None:
            task_fit.begin(s)
            shared, self.rules = [*shared, task_fit.grads], [self.update, task_fit]
        period = getattr(fit.sampler, "period", 1)
        source = source if how.ranks is None else Shared(source, shared, how.ranks, period)
        self.source: Source = source if how.accumulate == 1 else Accumulated(source, shared, how.accumulate, period)
        self.beside: list[Tensor] = []  # further tensors that change from epoch to epoch, such as copies
        self._still = None if fit.moves is None else ~fit.moves
        live = [] if fit.moves is None else [t for t in (values[0], q.log_std, self.variance) if t is not None]
        self._held = [(tensor, tensor.clone()) for tensor in live]
        self._stopped = torch.zeros_like(values[0][:, :1], dtype=torch.bool)  # replicas that are no longer updated
        for tracker in self.trackers:
            begin_tracker(tracker, self.q, Part(network.layout, layout))

    def _gradient(self, chain: LayerNames | None, bound: Bound, losses: Sequence[Loss]) -> Source:
        """What computes the gradient of the NLL and the losses: a chain where it can, else autograd."""
        fast = None if chain is None else self._by_chain(chain, bound, losses)
        if fast is not None and (self._losses or not losses):
            return fast
        slow = ByAutograd(bound, self.pool, losses, fast)
        self._losses = list(zip(map(term_name, losses), slow.values, strict=True))
        return slow

    def _by_chain(self, chain: LayerNames, bound: Bound, losses: Sequence[Loss]) -> Source:
        """A chain's pass. It includes distillation, and a loss on the logits of point weights."""
        network, values, grads, pool = bound.network, bound.values, bound.grads, self.pool
        kernels = gpu_kernels() if self.by_kernels else None
        distilled = None
        if network.task_weights is None:  # with FiLM, each head is distilled through a trunk of its own
            most = None if kernels is None else kernels.MOST_CLASSES
            distilled = find_lessons(losses, pool, network.classes, values[0], most)
        if distilled is not None:
            self._losses = [(term_name(losses[0]), distilled.value)]
        heads = pool.heads if distilled is None else all_heads(pool, losses)
        places = find_places(chain, bound.layout, heads)
        if kernels is not None:
            used = values if self._rounded is None else self._rounded
            fused: Source = kernels.Chain(places, used, grads, pool, distilled)
            return fused
        on_logits = None
        if len(losses) == 1 and isinstance(loss := losses[0], LogitLoss) and len(values) == 1:
            loss_values = values.new_zeros(values.shape[1])
            self._losses = [(term_name(loss), loss_values)]

            def on_logits(z: Tensor, places: Tensor) -> Tensor:
                value, gradient = loss.of_logits(z, pool.numbers(places))
                loss_values.copy_(value)
                return gradient

        film = bound.film_of(chain, pool.tasks[0])
        return Chain(places, values, grads, pool, network.weights.compute_dtype, distilled, film, on_logits)

    def _at(self, chain: LayerNames | None, losses: Sequence[Loss]) -> Callable[[Tensor, Tensor], Source]:
        """What a rule that computes its own gradient is given: see `Estimating.source`."""
        network, layout, pool = self.network, self.grads.layout, self.pool

        def at(theta: Tensor, into: Tensor) -> Source:
            fast = None
            if chain is not None and not theta.is_cuda:
                fast = Chain(find_places(chain, layout, pool.heads), theta, into, pool, network.weights.compute_dtype)
            if fast is not None and not losses:
                return fast
            mixed = ByAutograd(Bound(network, layout, theta, into), pool, losses, fast)
            self._losses = list(zip(map(term_name, losses), mixed.values, strict=True))
            return mixed

        return at

    def __call__(self, rows: Tensor | Batch, noise: Noise) -> Tensor:
        """Learn from the examples `rows` [R, B], or from a `Batch` if `by_kernels`. Returns their NLL before the step,
        [R], in a tensor that the next step overwrites.
        """
        if self.estimating is None:
            return self._once(rows, noise)
        assert isinstance(rows, Tensor)
        self.estimating.begin(rows.shape[1])
        nll = self._once(rows, noise)
        for _ in range(1, self.estimating.passes):
            nll = nll.clone()
            self._once(rows, noise)
        return nll

    def _once(self, rows: Tensor | Batch, noise: Noise) -> Tensor:
        """Compute the gradient and update."""
        for tracker in self.trackers:
            if tracker.perturbs:
                tracker.perturb(self.q, noise)
                if self._rounded is not None:
                    self._rounded.copy_(self._values)
        nll = self.source(rows, noise)
        if self.kept_grads is not None:
            project_(self.grads.mean, self.kept_grads[0])
        if self.trackers and (self._stopped.is_cuda or bool(self._stopped.any())):  # a GPU should not wait for a value
            self.grads.mean.masked_fill_(self._stopped, 0.0)
            if self.grads.variance is not None:
                self.grads.variance.masked_fill_(self._stopped, 0.0)
        for tracker in self.trackers:
            tracker.before(self.q, self.grads)
        if self.rest:
            add_gradients(self.rest, self.q, self.grads, self.variance)
        for rule in self.rules:
            rule()
        if self._still is not None:
            self._hold()
        for tracker in self.trackers:
            tracker.after(self.q)
        return nll

    def settle(self, batches: Sequence[Tensor], noises: Sequence[Noise]) -> None:
        """Move sigma to the optimum for the mean curvature of these batches, each drawn once with every noise; only if
        the update takes natural steps.
        """
        update, total, count = self.update, torch.zeros_like(self.grads.mean), 0
        if not isinstance(update, Update) or not isinstance(natural := update.log_std, Natural):
            return
        assert self.variance is not None
        torch.exp(2 * natural.weights, out=self.variance)  # of the best epoch, where there is one
        for rows, noise in product(batches, noises):
            self.source(rows, noise)
            assert self.grads.variance is not None
            total.add_(self.grads.variance, alpha=rows.shape[1])
            count += rows.shape[1]
        assert update.pull is not None
        natural.settle(total.masked_fill_(self._stopped, 0.0) / count, update.pull)
        if self._still is not None:
            self._hold()

    def freeze(self, rows: Tensor) -> None:
        """Stop updating the replicas for which `rows` [R] is True; trackers no longer receive their gradients."""
        self._stopped |= rows.view(-1, 1)
        for rule in self.rules:
            rule.freeze(rows)

    def scale(self, factor: float) -> None:
        """From now on, learning rates are `factor` times those of the settings."""
        for rule in self.rules:
            rule.scale(factor)

    def resume(self, steps: int) -> None:
        """Continue after this many steps; the buffers have been restored."""
        for rule in self.rules:
            rule.resume(steps)

    def _hold(self) -> None:
        """Restore the weights that must not move."""
        assert self._still is not None
        for tensor, value in self._held:
            torch.where(self._still, value, tensor, out=tensor)
        if self._rounded is not None:
            self._rounded.copy_(self._values)

    def losses_now(self) -> dict[str, Tensor]:
        """[R] each, by name: the current values of the method's terms, and its losses at the last step. Their sum and
        the mean NLL make up the objective.
        """
        losses: dict[str, Tensor] = {}
        parts = [(term_name(term), term.loss(self.q)) for term in self.terms]
        parts += [(name, value.clone()) for name, value in self._losses]
        for name, value in parts:
            losses[name] = losses[name] + value if name in losses else value
        return losses

    def buffers(self) -> list[Tensor]:
        """Every tensor that a step changes, and those in `beside`."""
        tracked = [buffer for tracker in self.trackers for buffer in tracker.buffers()]
        losses = [value for _, value in self._losses]
        updated = [buffer for rule in self.rules for buffer in rule.buffers()]
        return [*updated, *self.statistics, *tracked, *losses, *self.beside]

    def judged(self, nll: Tensor) -> tuple[Tensor, Tensor]:
        """An epoch's NLL [R], summed over the processes that share it, and whether NLL and weights are valid [R].

        Weights are valid if every mean is finite, and every variance finite and above 0. A replica that diverges in one
        process counts as diverged in all.
        """
        sound = nll.isfinite() & self.q.mean.isfinite().all(1)
        variance = self.q.variance()
        if variance is not None:
            sound &= variance.isfinite().all(1) & (variance > 0).all(1)
        if self.task_fit is not None:
            sound &= self.task_fit.values.isfinite().flatten(1).all(1)
        if self.ranks is None:
            return nll, sound
        nll, unsound = self.ranks.sum_(torch.stack([nll, (~sound).to(nll)]))
        return nll, unsound == 0


def _rounded(network: BayesianNetwork, values: Tensor) -> Tensor | None:
    """A copy of the weights in the precision in which kernels compute, if that is a lower one."""
    dtype = network.weights.compute_dtype
    return None if dtype is None else values.to(dtype)
