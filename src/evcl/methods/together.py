"""Several methods in one program: each replica follows its own, and their fits are merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.settings import Settings
from evcl.methods.data import Minibatch, TaskData
from evcl.methods.method import Fit, Fitted, Loss, Method, Round, Tracker
from evcl.methods.terms import Differentiated, Gradients, Quadratic, Spring, Springs, Term, term_name
from evcl.nn import BayesianNetwork, Gaussian, head_names

Rows = list[int]  # the replicas of one group


@dataclass(frozen=True)
class Group:
    """The replicas of a program that follow one method with settings that differ in real numbers alone."""

    method: Method
    rows: Rows
    settings: Settings  # real numbers that differ are [R', 1]


def grouped(methods: Sequence[Method], settings: Sequence[Settings]) -> list[tuple[Method, Rows]]:
    """Which replicas follow which method, all of one kind: Bayesian or not, jointly or not."""
    found: dict[Any, tuple[Method, Rows]] = {}
    for r, (method, s) in enumerate(zip(methods, settings, strict=True)):
        words = tuple((name, s[name]) for name in method.known_settings if not isinstance(s[name], float))
        found.setdefault((method.name, words), (method, []))[1].append(r)
    groups = list(found.values())
    names = " and ".join(dict.fromkeys(method.name for method, _ in groups))
    if len({kind(method) for method, _ in groups}) > 1:
        raise EvclError(f"{names} are of different kinds and cannot share a program")
    return groups


def kind(method: Method) -> tuple[object, ...]:
    """What methods that share a program have in common."""
    return method.bayesian, method.jointly, method.stages, method.shares


def round_of(round_: Round, rows: Rows) -> Round:
    """A round as these replicas see it."""
    tasks = [task.replicas(rows) for task in round_.tasks]
    seeds = [round_.seeds[r] for r in rows]
    return replace(round_, tasks=tasks, posterior=_rows(round_.posterior, rows), seeds=seeds)


def fitted_of(fitted: Fitted, fit: Fit, rows: Rows, tracked: Sequence[Tensor | None]) -> Fitted:
    """What a merged fit ended with, for these replicas, whose own `fit` and trackers' results these are.

    Heads that only the losses of others use are none of theirs.
    """
    network, whole = fitted.network, fitted.layout
    heads = {task.head for task in fit.data} | {k for loss in fit.losses for k in loss.heads}
    others = {name for k in range(len(network.heads)) if k not in heads for name in head_names(k).values()}
    layout = whole
    if others & whole.shapes.keys():
        stored = {name: shape for name, shape in whole.stored.items() if name not in others}
        layout = whole.part(stored, stored)
    own = _rows(fitted.own, rows).map(lambda t: whole.gather(t, layout), layout)
    used = fitted.used.clone()
    for name in whole.shapes.keys() - layout.shapes.keys():
        network.layout.view(used, name).zero_()
    return replace(fitted, q=_rows(fitted.q, rows), own=own, layout=layout, used=used, tracked=tracked)


def merged(fits: Sequence[Fit], groups: Sequence[Group], round_: Round) -> Fit:
    """One fit for all groups; what cannot be merged is refused."""
    names = " and ".join(dict.fromkeys(group.method.name for group in groups))
    first = fits[0]

    def same(what: str) -> Any:
        if any(getattr(fit, what) != getattr(first, what) for fit in fits):
            raise EvclError(
                f"{names} cannot share a program: their fits differ in {what}; give shares= a word of its own"
            )
        return getattr(first, what)

    if any(fit.model is not None or fit.moves is not None for fit in fits):
        raise EvclError(
            f"{names} cannot share a program: one trains another network or a part; give shares= a word of its own"
        )
    count, device = len(round_.seeds), round_.posterior.mean.device
    own = [(fit, torch.tensor(group.rows, device=device)) for fit, group in zip(fits, groups, strict=True)]
    terms = [_term(term, rows, count) for fit, rows in own for term in fit.terms]
    losses = [LossOf(loss, rows) for fit, rows in own for loss in fit.losses]
    trackers = [TrackerOf(one, rows) for fit, rows in own for one in fit.trackers]
    start = None
    if any(fit.start is not None for fit in fits):
        start = Gaussian(round_.posterior.mean.clone(), _cloned(round_.posterior.log_std))
        for fit, group in zip(fits, groups, strict=True):
            if fit.start is not None:
                start.mean[group.rows] = fit.start.mean
                if start.log_std is not None and fit.start.log_std is not None:
                    start.log_std[group.rows] = fit.start.log_std
    return Fit(
        data=_data([fit.data for fit in fits], groups, round_, names),
        terms=terms,
        losses=losses,
        trackers=trackers,
        start=start,
        sampler=same("sampler"),
        likelihood=same("likelihood"),
        rule=same("rule"),
        capture=all(fit.capture for fit in fits),
        stage=same("stage"),
        number=same("number"),
    )


def _data(each: Sequence[Sequence[TaskData]], groups: Sequence[Group], round_: Round, names: str) -> Sequence[TaskData]:
    """The groups' data side by side: as it is where all learn from the round's own."""
    own = [[task.replicas(group.rows) for task in round_.tasks] for group in groups]
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
        for part, group in zip(parts, groups, strict=True):
            if part.x.shape[1:] != x.shape[1:] or part.head != parts[0].head or part.weights is not None:
                raise EvclError(f"{names} cannot share a program: their examples are of other numbers or shapes")
            repeats = torch.arange(len(group.rows)) % len(part.x)
            whole.x[group.rows], whole.y[group.rows] = part.x[repeats], part.y[repeats]
        found.append(whole)
    return found


def _zipped(each: Sequence[Sequence[TaskData]], names: str) -> list[tuple[TaskData, ...]]:
    if len({len(data) for data in each}) > 1:
        raise EvclError(
            f"{names} cannot share a program: they learn from different tasks; give shares= a word of its own"
        )
    return list(zip(*each, strict=True))


def _is(a: TaskData, b: TaskData) -> bool:
    shared = a is b or (a.x is b.x and a.y is b.y)
    return shared or (a.x.shape == b.x.shape and a.head == b.head and torch.equal(a.y, b.y) and torch.equal(a.x, b.x))


def _cloned(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


# What a step uses of these knows its rows as a tensor on the device: a CUDA graph takes nothing from the host.


def _term(term: Term, rows: Tensor, count: int) -> Term:
    if isinstance(term, Quadratic):
        return QuadraticOf(term, rows, count)
    return DifferentiatedOf(term, rows, count) if isinstance(term, Differentiated) else TermOf(term, rows, count)


@dataclass(frozen=True)
class TermOf:
    """A term of some replicas; 0 for the others."""

    term: Any
    rows: Tensor
    count: int

    @property
    def name(self) -> str:
        return term_name(self.term)

    def loss(self, q: Gaussian) -> Tensor:
        return q.mean.new_zeros(self.count).index_add(0, self.rows, self.term.loss(_rows(q, self.rows)))


class QuadraticOf(TermOf):
    """The others' springs have no stiffness."""

    def springs(self) -> Springs:
        pull = self.term.springs()
        return Springs(*(part and self._spread(part) for part in (pull.mean, pull.linear, pull.square)))

    def _spread(self, part: Spring) -> Spring:
        shape = (self.count, part.c.shape[1])
        found = Spring(part.c.new_zeros(shape), part.c.new_zeros(shape))
        found.w[self.rows], found.c[self.rows] = part.w, part.c
        return found


class DifferentiatedOf(TermOf):
    """The others' gradients are left alone."""

    def add_gradient(self, q: Gaussian, grads: Gradients) -> None:
        own = _gradients(grads, self.rows)
        self.term.add_gradient(_rows(q, self.rows), own)
        for whole, part in ((grads.mean, own.mean), (grads.variance, own.variance)):
            if whole is not None and part is not None:
                whole.index_copy_(0, self.rows, part)


@dataclass(frozen=True)
class LossOf(Loss):
    """A loss of some replicas: it sees a network of theirs alone."""

    loss: Loss
    rows: Tensor

    @property
    def heads(self) -> Sequence[int]:  # type: ignore[override]
        return self.loss.heads

    @property
    def name(self) -> str:
        return term_name(self.loss)

    def __call__(self, network: BayesianNetwork, batch: Minibatch) -> Tensor:
        total = batch.x.new_zeros(len(batch.rows))
        with network.narrowed(self.rows):
            own = self.loss(network, batch.of(self.rows))
        return total.index_add(0, self.rows, own)


class TrackerOf(Tracker):
    """A tracker of some replicas."""

    def __init__(self, tracker: Tracker, rows: Tensor) -> None:
        self.tracker, self.rows = tracker, rows

    def begin(self, q: Gaussian) -> None:
        self.tracker.begin(_rows(q, self.rows))

    def before(self, q: Gaussian, grads: Gradients) -> None:
        self.tracker.before(_rows(q, self.rows), _gradients(grads, self.rows))

    def after(self, q: Gaussian) -> None:
        self.tracker.after(_rows(q, self.rows))

    def buffers(self) -> list[Tensor]:
        return self.tracker.buffers()

    def result(self) -> Tensor | None:
        return self.tracker.result()


def _rows(gaussian: Gaussian, rows: Rows | Tensor) -> Gaussian:
    return gaussian.map(lambda t: t[rows], gaussian.layout)


def _gradients(grads: Gradients, rows: Tensor) -> Gradients:
    """A copy of those of these replicas."""
    return Gradients(grads.mean[rows], None if grads.variance is None else grads.variance[rows], grads.layout)
