"""Run several methods in one program: each replica follows its own method, and their fits are merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.randomness import Noise
from evcl._core.settings import Settings
from evcl.methods.data import Minibatch, TaskData
from evcl.methods.memory import Model
from evcl.methods.method import Fit, Fitted, Loss, Method, Round, Tracker
from evcl.methods.terms import Differentiated, Gradients, Quadratic, Spring, Springs, Term, term_name
from evcl.nn import BayesianNetwork, Gaussian, Part, head_names


@dataclass(frozen=True)
class ReplicaGroup:
    """The replicas of a program that follow one method and whose settings differ only in real numbers."""

    method: Method
    replicas: list[int]  # their numbers within the program
    settings: Settings  # real numbers that differ are [R', 1], for the R' replicas of the group


def grouped(methods: Sequence[Method], settings: Sequence[Settings]) -> list[tuple[Method, list[int]]]:
    """Which replicas follow which method. All methods must be of the same `kind`."""
    found: dict[Any, tuple[Method, list[int]]] = {}
    for r, (method, s) in enumerate(zip(methods, settings, strict=True)):
        words = tuple((name, s[name]) for name in method.known_settings if not isinstance(s[name], float))
        found.setdefault((method.name, words), (method, []))[1].append(r)
    groups = list(found.values())
    names = " and ".join(dict.fromkeys(method.name for method, _ in groups))
    if len({kind(method) for method, _ in groups}) > 1:
        raise EvclError(f"{names} cannot share a program: they differ in `bayesian`, `jointly`, `stages` or `shares`")
    return groups


def kind(method: Method) -> tuple[object, ...]:
    """The properties that must be equal for methods to share a program."""
    return method.bayesian, method.jointly, method.stages, method.shares


def round_of(round_: Round, replicas: list[int]) -> Round:
    """The part of a round that concerns these replicas."""
    tasks = [task.replicas(replicas) for task in round_.tasks]
    seeds = [round_.seeds[r] for r in replicas]
    return replace(round_, tasks=tasks, posterior=_of(round_.posterior, replicas), seeds=seeds)


def fitted_of(fitted: Fitted, fit: Fit, replicas: list[int], tracked: Sequence[Tensor | None]) -> Fitted:
    """The result of a merged fit for these replicas. `fit` and `tracked` are their own fit and their trackers' results.

    Heads that only the losses of other replicas use are left out.
    """
    network, whole = fitted.network, fitted.layout
    heads = {task.head for task in fit.data} | {k for loss in fit.losses for k in loss.heads}
    others = {name for k in range(len(network.heads)) if k not in heads for name in head_names(k).values()}
    layout = whole
    if others & whole.shapes.keys():
        stored = {name: shape for name, shape in whole.stored.items() if name not in others}
        layout = whole.part(stored, stored)
    own = _of(fitted.own, replicas).map(lambda t: whole.gather(t, layout), layout)
    used = fitted.used.clone()
    for name in whole.shapes.keys() - layout.shapes.keys():
        network.layout.view(used, name).zero_()
    model = fitted.model
    if model is not None and fit.model is not None:
        statistics = {name: tensor[replicas] for name, tensor in model.statistics.items()}
        model = replace(fit.model, posterior=_of(model.posterior, replicas), statistics=statistics)
    return replace(fitted, q=_of(fitted.q, replicas), own=own, layout=layout, used=used, tracked=tracked, model=model)


def merged(fits: Sequence[Fit], groups: Sequence[ReplicaGroup], round_: Round) -> Fit:
    """Merge the fits of all groups into one; refuse fits that cannot be merged."""
    names = " and ".join(dict.fromkeys(group.method.name for group in groups))
    first = fits[0]

    def same(what: str) -> Any:
        if any(getattr(fit, what) != getattr(first, what) for fit in fits):
            raise EvclError(
                f"{names} cannot share a program: their fits differ in {what}; give each method its own shares="
            )
        return getattr(first, what)

    count, device = len(round_.seeds), round_.posterior.mean.device
    model = _model(fits, groups, count, names)
    whole = round_.posterior if model is None else model.posterior
    own = [(fit, torch.tensor(group.replicas, device=device)) for fit, group in zip(fits, groups, strict=True)]
    terms = [_term(term, replicas, count) for fit, replicas in own for term in fit.terms]
    losses = [LossOf(loss, replicas) for fit, replicas in own for loss in fit.losses]
    trackers = [TrackerOf(one, replicas) for fit, replicas in own for one in fit.trackers]
    start = None
    if any(fit.start is not None for fit in fits):
        start = Gaussian(whole.mean.clone(), _cloned(whole.log_std))
        for fit, group in zip(fits, groups, strict=True):
            if fit.start is not None:
                start.mean[group.replicas] = fit.start.mean
                if start.log_std is not None and fit.start.log_std is not None:
                    start.log_std[group.replicas] = fit.start.log_std
    moves = None
    if any(fit.moves is not None for fit in fits):
        moves = torch.ones_like(whole.mean, dtype=torch.bool)
        for fit, group in zip(fits, groups, strict=True):
            if fit.moves is not None:
                moves[group.replicas] = fit.moves.bool()
    return Fit(
        data=_data([fit.data for fit in fits], groups, round_, names),
        terms=terms,
        losses=losses,
        trackers=trackers,
        start=start,
        moves=moves,
        model=model,
        sampler=same("sampler"),
        likelihood=same("likelihood"),
        rule=same("rule"),
        rates=_rates(fits, groups, whole.mean, names),
        capture=all(fit.capture for fit in fits),
        film=same("film"),
        fresh=same("fresh"),
        stage=same("stage"),
        number=same("number"),
        batch=same("batch"),
        project=same("project"),
    )


def _model(fits: Sequence[Fit], groups: Sequence[ReplicaGroup], count: int, names: str) -> Model | None:
    """The groups' second networks as one, of the first group's module; None: they train none."""
    models = [fit.model for fit in fits if fit.model is not None]
    if not models:
        return None
    if len(models) < len(fits) or len({tuple(one.network.layout.shapes.items()) for one in models}) > 1:
        raise EvclError(
            f"{names} cannot share a program: their second networks differ; give each method its own shares="
        )

    def joined(parts: Sequence[Tensor]) -> Tensor:
        found = parts[0].new_empty(count, *parts[0].shape[1:])
        for part, group in zip(parts, groups, strict=True):
            found[group.replicas] = part
        return found

    stds = [one.posterior.log_std for one in models]
    log_std = None if stds[0] is None else joined([std for std in stds if std is not None])
    posterior = Gaussian(joined([one.posterior.mean for one in models]), log_std)
    statistics = {name: joined([one.statistics[name] for one in models]) for name in models[0].statistics}
    return replace(models[0], posterior=posterior, statistics=statistics)


def _rates(fits: Sequence[Fit], groups: Sequence[ReplicaGroup], like: Tensor, names: str) -> dict[str, Any]:
    """The groups' own rates: numbers may differ, and are then [R, 1]."""
    words = [{name: v for name, v in fit.rates.items() if isinstance(v, str)} for fit in fits]
    if len({tuple(fit.rates) for fit in fits}) > 1 or any(one != words[0] for one in words):
        raise EvclError(f"{names} cannot share a program: their fits differ in rates; give each method its own shares=")
    found: dict[str, Any] = {}
    for name in fits[0].rates:
        values = [fit.rates[name] for fit in fits]
        if not any(isinstance(value, Tensor) for value in values) and len(set(values)) == 1:
            found[name] = values[0]
            continue
        found[name] = like.new_empty(len(like), 1)
        for value, group in zip(values, groups, strict=True):
            found[name][group.replicas] = value
    return found


def _data(
    each: Sequence[Sequence[TaskData]], groups: Sequence[ReplicaGroup], round_: Round, names: str
) -> Sequence[TaskData]:
    """The groups' data combined; the round's own tasks, without a copy, if all groups train on those."""
    own = [[task.replicas(group.replicas) for task in round_.tasks] for group in groups]
    if all(
        len(data) == len(ours) and all(_is(a, b) for a, b in zip(data, ours, strict=True))
        for data, ours in zip(each, own, strict=True)
    ):
        return round_.tasks
    found = []
    for parts in _zipped(each, names):
        x, y = parts[0].x, parts[0].y
        count = len(round_.seeds)
        whole = TaskData(
            x.new_empty(count, *x.shape[1:]), y.new_empty(count, *y.shape[1:]), parts[0].head, None, parts[0].task
        )
        if any(part.weights is not None for part in parts):
            whole = replace(whole, weights=whole.counts)
        for part, group in zip(parts, groups, strict=True):
            if part.x.shape[1:] != x.shape[1:] or part.head != parts[0].head:
                raise EvclError(f"{names} cannot share a program: their examples differ in number, shape or head")
            repeats = torch.arange(len(group.replicas)) % len(part.x)
            whole.x[group.replicas], whole.y[group.replicas] = part.x[repeats], part.y[repeats]
            if whole.weights is not None and part.weights is not None:
                whole.weights[group.replicas] = part.weights[torch.arange(len(group.replicas)) % len(part.weights)]
        found.append(whole)
    return found


def _zipped(each: Sequence[Sequence[TaskData]], names: str) -> list[tuple[TaskData, ...]]:
    if len({len(data) for data in each}) > 1:
        raise EvclError(f"{names} cannot share a program: they learn different tasks; give each method its own shares=")
    return list(zip(*each, strict=True))


def _is(a: TaskData, b: TaskData) -> bool:
    same = a.x is b.x and a.y is b.y
    same = same or (a.x.shape == b.x.shape and a.head == b.head and torch.equal(a.y, b.y) and torch.equal(a.x, b.x))
    if a.weights is None or b.weights is None:
        return same and a.weights is b.weights
    return same and torch.equal(a.weights, b.weights)


def _cloned(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


# The classes below keep `replicas` as a tensor on the device, because a CUDA graph cannot take values from the host.


def _term(term: Term, replicas: Tensor, count: int) -> Term:
    if isinstance(term, Quadratic):
        return QuadraticOf(term, replicas, count)
    return (
        DifferentiatedOf(term, replicas, count) if isinstance(term, Differentiated) else TermOf(term, replicas, count)
    )


@dataclass(frozen=True)
class TermOf:
    """A term that applies to some replicas; it is 0 for the others."""

    term: Any
    replicas: Tensor
    count: int

    @property
    def name(self) -> str:
        return term_name(self.term)

    def loss(self, q: Gaussian) -> Tensor:
        return q.mean.new_zeros(self.count).index_add(0, self.replicas, self.term.loss(_of(q, self.replicas)))


class QuadraticOf(TermOf):
    """A quadratic term of some replicas; the springs of the others have stiffness 0."""

    def springs(self) -> Springs:
        pull = self.term.springs()
        return Springs(*(part and self._spread(part) for part in (pull.mean, pull.linear, pull.square)))

    def _spread(self, part: Spring) -> Spring:
        shape = (self.count, part.c.shape[1])
        found = Spring(part.c.new_zeros(shape), part.c.new_zeros(shape))
        found.w[self.replicas], found.c[self.replicas] = part.w, part.c
        return found


class DifferentiatedOf(TermOf):
    """A term of some replicas that computes its own gradient; the others' gradients stay unchanged."""

    def add_gradient(self, q: Gaussian, grads: Gradients) -> None:
        own = _gradients(grads, self.replicas)
        self.term.add_gradient(_of(q, self.replicas), own)
        for whole, part in ((grads.mean, own.mean), (grads.variance, own.variance)):
            if whole is not None and part is not None:
                whole.index_copy_(0, self.replicas, part)


@dataclass(frozen=True)
class LossOf(Loss):
    """A loss that applies to some replicas; it is given a network narrowed to them."""

    loss: Loss
    replicas: Tensor

    @property
    def heads(self) -> Sequence[int]:  # type: ignore[override]
        return self.loss.heads

    @property
    def name(self) -> str:
        return term_name(self.loss)

    def prepare(self, network: BayesianNetwork, batch: Minibatch) -> None:
        if type(self.loss).prepare is not Loss.prepare:
            raise EvclError("a loss that prepares the network cannot share a program with other settings or methods")

    def __call__(self, network: BayesianNetwork, batch: Minibatch) -> Tensor:
        total = batch.x.new_zeros(len(batch.rows))
        with network.narrowed(self.replicas):
            own = self.loss(network, batch.of(self.replicas))
        return total.index_add(0, self.replicas, own)


class TrackerOf(Tracker):
    """A tracker that follows some replicas only."""

    def __init__(self, tracker: Tracker, replicas: Tensor) -> None:
        self.tracker, self.replicas = tracker, replicas

    def begin(self, q: Gaussian, part: Part) -> None:
        self.tracker.begin(_of(q, self.replicas), part)

    @property
    def perturbs(self) -> bool:
        return self.tracker.perturbs

    def perturb(self, q: Gaussian, noise: Noise) -> None:
        own = _of(q, self.replicas)
        self.tracker.perturb(own, noise.of(self.replicas))
        q.mean.index_copy_(0, self.replicas, own.mean)

    def before(self, q: Gaussian, grads: Gradients) -> None:
        weights, own = _of(q, self.replicas), _gradients(grads, self.replicas)
        self.tracker.before(weights, own)
        if self.perturbs:
            q.mean.index_copy_(0, self.replicas, weights.mean)
            grads.mean.index_copy_(0, self.replicas, own.mean)

    def after(self, q: Gaussian) -> None:
        self.tracker.after(_of(q, self.replicas))

    def buffers(self) -> list[Tensor]:
        return self.tracker.buffers()

    def result(self) -> Tensor | None:
        return self.tracker.result()


def _of(gaussian: Gaussian, replicas: list[int] | Tensor) -> Gaussian:
    return gaussian.map(lambda t: t[replicas], gaussian.layout)


def _gradients(grads: Gradients, replicas: Tensor) -> Gradients:
    """A copy of the gradients of these replicas."""
    return Gradients(grads.mean[replicas], None if grads.variance is None else grads.variance[replicas], grads.layout)
