"""How often the rows of each earlier task count in the objective of a round, by part of the objective; and its ELBO.

At the start of a task, part p of the objective has the diagonal curvature H_p on the means, in nats: N times what is
added to the mean NLL of N rows. For penalties it is known in closed form; for a distillation loss it is
sum_k w_k F_T, with the Fisher F_T of head k on the new rows at temperature T. F_k is that of earlier task k: its
number of rows times its diagonal Fisher, at the weights that it ended with. A precision that the first prior has is of
no row, and is left out. The counts c >= 0 are those with which |H_p - sum_k c_k F_k| is smallest: for one earlier task,
c = <H_p, F> / <F, F>.

The Fishers of tasks with rows of one distribution hardly differ, and what the squares would make of their differences
is chance. So c_k = m + d_k, with the count of all rows together, m = <H_p, S> / <S, S> for S = sum_k F_k, and d in the
directions in which the Fishers differ: those eigenvectors of the matrix of their cosines whose eigenvalue is above
APART. Tasks with a cosine above 1 - APART have one count.

Of each task the SKETCH largest entries of its Fisher are kept, on which nearly all of its products depend: all of them
on small networks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evcl._core.devices import double
from evcl._core.errors import EvclError
from evcl._core.randomness import Purpose
from evcl.methods import Fit, Fitted, Round, TaskData
from evcl.methods.applied import term_name
from evcl.methods.method import Taught
from evcl.methods.terms import Quadratic
from evcl.nn import BayesianNetwork, Layout, outputs

if TYPE_CHECKING:
    from evcl.curvature import Sample

HEAD = 2**40  # the distance between the places of two heads
SKETCH = 256  # entries of a Fisher that are kept
FISHERS, PLACES = "fishers", "places"  # in a file, beside the numbers of heads
MAX_TASKS = 20  # tasks that are told apart; of more, the oldest count as one
MEASURED_OUTPUTS, MIN_ROWS = 2560, 16  # outputs differentiated per measurement, and rows at least
APART = 0.1  # 1 - the cosine between two Fishers above which their tasks are told apart
ELBO_DRAWS = 10  # draws of the weights that the expected NLL is averaged over


class Counts(dict[str, dict[str, float]]):
    """How often each earlier task's rows count: task -> part, or "sum" -> count. Its text is a table."""

    def __repr__(self) -> str:
        if not self:
            return "no account: nothing was learned before, or it is not known how often its rows count"
        parts = list(next(iter(self.values())))
        wide = max(12, *map(len, self))
        lines = [["", *parts], *([name, *(f"{row[part]:.2f}" for part in parts)] for name, row in self.items())]
        return "\n".join(f"{name:{wide}}" + "".join(f"{cell:>14}" for cell in row) for name, *row in lines)

    __str__ = __repr__


@dataclass(frozen=True)
class Account:
    """What a run knows about how often rows count.

    Attributes:
        fishers: [K, at most SKETCH] in float32, the largest entries of the last K tasks' Fishers; of many tasks, the
            first is of all up to this one
        places: [K, at most SKETCH], their weights (see `placed`); -1: there are no more
        tasks: the number of tasks
        counts: part -> how often each of the K counts in the round that is learned, or was learned last
        units: head of numbers -> r^2 [D], for all changes of its scale, which multiplied its weights by r: a sketch has
            the units of the head's first task
        elbo: of that round, at its end, in nats: `elbo` = -`nll` - `kl`, the expected NLL of its rows under the
            posterior, and the divergence of the posterior from the round's prior; empty for point weights
    """

    fishers: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    places: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))
    tasks: int = 0
    counts: Mapping[str, Sequence[float]] = field(default_factory=dict)
    elbo: Mapping[str, float] = field(default_factory=dict)
    units: Mapping[int, Tensor] = field(default_factory=dict)

    def rescaled(self, head: int, r: Tensor) -> Account:
        """After the weights of a head were multiplied by r [D]."""
        return replace(self, units={**self.units, head: self.units.get(head, 1.0) * double(r).cpu().square()})

    @classmethod
    def read(cls, saved: Mapping[str, Tensor], tasks: int) -> Account | None:
        """From a file's tensors, after this many tasks; None if they are unknown. Raises if one cannot be right."""
        units = {int(name): one for name, one in saved.items() if name not in (FISHERS, PLACES)}
        made = cls(tasks=tasks, units=units)
        if FISHERS in saved:
            made = replace(made, fishers=saved[FISHERS], places=saved[PLACES])
        shape, right = made.fishers.shape, made.places.dtype == torch.long and made.fishers.is_floating_point()
        right = right and len(shape) == 2 and shape == made.places.shape and shape[1] <= SKETCH
        if not right or not all(
            one.dim() == 1 and bool(one.isfinite().all()) for one in (*units.values(), made.fishers.sum(0))
        ):
            raise EvclError("what it keeps of its tasks' Fishers cannot be right")
        return made if len(made.fishers) == min(tasks, MAX_TASKS) else None

    def tensors(self) -> dict[str, Tensor]:
        """For a file: the inverse of `read`."""
        own = {FISHERS: self.fishers, PLACES: self.places} if self.tasks else {}
        return {**own, **{str(k): one for k, one in self.units.items()}}

    def described(self, tasks: Sequence[str], new: int) -> dict[str, object]:
        """For the record of a round after which there are these tasks, the last `new` of which it learned."""
        earlier = list(tasks)[: len(tasks) - new][-MAX_TASKS:]
        if len(tasks) - new > MAX_TASKS:
            earlier[0] = f"up to {earlier[0]}"
        columns = {**self.counts, "sum": torch.tensor([*self.counts.values()]).sum(0).tolist()} if self.counts else {}
        rows: dict[str, dict[str, float]] = {name: {} for name in earlier}
        for part, each in columns.items():
            for i, name in enumerate(earlier):
                rows[name][part] = each[i]
        return {**({"account": rows} if columns else {}), **({"elbo": dict(self.elbo)} if self.elbo else {})}

    @torch.no_grad()
    def begun(self, fit: Fit, round_: Round, first: Tensor | None) -> Account:
        """With the counts at the start of a round's fit. `first` [R, P]: the precision of the first prior."""
        parts = dict[str, Tensor]()
        if len(self.fishers):
            every, at = self.places.clamp_min(0).unique(return_inverse=True)
            known = torch.zeros(len(self.fishers), len(every), dtype=torch.float64)
            known.scatter_add_(1, at, self.fishers.double())
            for name, h in _curvatures(fit, round_, first):
                places, flat = placed(round_.network, h, self.units)
                order = places.argsort()
                at = order[torch.searchsorted(places[order], every).clamp_max(len(order) - 1)]
                one = round_.n * torch.where(places[at] == every, flat[at], 0.0)
                parts[name] = parts[name] + one if name in parts else one
        return replace(self, counts={name: counts(h, known) for name, h in parts.items()}, elbo={})

    @torch.no_grad()
    def ended(self, fit: Fit, fitted: Fitted, round_: Round) -> Account:
        """With the ELBO of the round, if the fit has a prior."""
        prior = next((term.prior for term in fit.terms if hasattr(term, "prior")), None)
        if prior is None or fitted.own.log_std is None or {t.head for t in round_.tasks} - {t.head for t in fit.data}:
            return self
        from evcl.methods.importance import drawn_points

        nll = 0.0
        for i, task in enumerate(round_.tasks):
            sources = round_.generators(Purpose.ACCOUNT, i)
            sample = measured_rows(task, round_, sources, (fitted.network, fitted.own.mean, fitted.layout))
            for point in drawn_points(fitted.own, fitted.layout, ELBO_DRAWS, sources):
                about = (fitted.network, point, fitted.layout, sample.x, [task.head])
                z = outputs(*about, task=sample.task, from_below=sample.from_below).flatten(0, 1)
                assert sample.y is not None
                each = round_.likelihood.nll(z, sample.y.flatten(0, 1), None)
                weights = each.new_ones(len(each)) if sample.weights is None else sample.weights.flatten()
                nll += task.n / ELBO_DRAWS * float((weights * each).mean())
        kl = float(fitted.q.kl(prior)[0])
        return replace(self, elbo={"nll": nll, "kl": kl, "elbo": -nll - kl})

    @torch.no_grad()
    def learned(self, round_: Round) -> Account:
        """With the Fishers of a round's tasks, at the posterior that it ended with."""
        from evcl import curvature

        new: dict[int, Tensor] = {}
        for i, task in enumerate(round_.tasks):
            sources = round_.generators(Purpose.ACCOUNT, i)
            whole = round_.network, round_.posterior.mean, round_.network.layout
            sample = measured_rows(task, round_, sources, whole)
            fisher = task.n * curvature.fisher(sample, likelihood=round_.likelihood)
            places, own = placed(round_.network, fisher, self.units)
            new[task.task] = new[task.task] + own if task.task in new else own
        at, kept = self.places, self.fishers
        for own in new.values():
            at, kept = _with_row(at, kept, places, own)
        if (more := len(kept) - MAX_TASKS) > 0:
            old, within = at[: more + 1].unique(return_inverse=True)
            together = torch.zeros(len(old), dtype=torch.float64)
            together.index_add_(0, within.flatten(), kept[: more + 1].double().flatten())
            at, kept = (torch.roll(t, 1, 0) for t in _with_row(at[more + 1 :], kept[more + 1 :], old, together))
        return replace(self, fishers=kept, places=at, tasks=self.tasks + len(new))


def _with_row(at: Tensor, kept: Tensor, places: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Places and Fishers with one more row, the largest entries of this one."""
    top = own.topk(min(SKETCH, int((own > 0).sum()))).indices
    width = max(len(top), kept.shape[1])

    def joined(rows: Tensor, row: Tensor, fill: int) -> Tensor:
        both = [torch.nn.functional.pad(one, (0, width - one.shape[1]), value=fill) for one in (rows, row.unsqueeze(0))]
        return torch.cat(both)

    return joined(at, places[top], -1), joined(kept, own[top].float(), 0)


def measured_rows(
    task: TaskData,
    round_: Round,
    sources: list[torch.Generator],
    at: tuple[BayesianNetwork, Tensor, Layout],
    times: int = 1,
) -> Sample:
    """Some rows of a task, with a network at these weights: fewer, if they are measured several `times`."""
    from evcl.curvature import Sample

    network = at[0]
    width = network.classes(task.head) if round_.likelihood.heads else MEASURED_OUTPUTS // MIN_ROWS
    rows = task.drawn(sources, max(MIN_ROWS, MEASURED_OUTPUTS // (width * times)))
    data, from_below = task.seen_by(network)
    about = (*at, [task.head], *data.take(rows), task.take_weights(rows), task.task)
    return Sample(*about, ranks=round_.ranks, from_below=from_below)


def _curvatures(fit: Fit, round_: Round, first: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    """The parts of a fit's objective, each with its curvature [R, P] on the means, in units of the mean NLL."""
    for term in fit.terms:
        if hasattr(term, "curvature"):
            yield term_name(term), term.curvature(round_.network.layout)
        elif isinstance(term, Quadratic):
            springs = term.springs()
            if springs.mean is None:
                continue
            h = springs.mean.w
            if springs.linear is not None and first is not None:  # a KL: of its prior, the first prior is of no row
                h = h * (1 - first * springs.linear.c).clamp_min(0)
            yield term_name(term), h
    for loss in fit.losses:
        if (lesson := loss.taught()) is not None:
            yield term_name(loss), _taught(lesson, round_)


def _taught(lesson: Taught, round_: Round) -> Tensor:
    """[R, P]: the curvature of a distillation loss."""
    from evcl import curvature

    network, mean, total = round_.network, round_.posterior.mean, torch.zeros_like(round_.posterior.mean)
    for i, task in enumerate(round_.tasks):
        for k, strength in zip(lesson.heads, lesson.strength, strict=True):
            own = round_.last_task(k) if network.task_weights is not None else task.task
            through = replace(task, head=k, task=task.task if own is None else own)
            sources, at = round_.generators(Purpose.ACCOUNT, i), (network, mean, network.layout)
            sample = measured_rows(through, round_, sources, at, len(lesson.heads))
            w = strength.flatten(1).mean(1, keepdim=True) if isinstance(strength, Tensor) else strength
            bent = curvature.fisher(replace(sample, weights=None), temperature=lesson.temperature)
            total += task.n / round_.n * w * bent
    return total


def placed(network: BayesianNetwork, values: Tensor, units: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
    """[P] each: the places of the weights, and curvatures [1, P] in these units. A weight keeps its place as heads are
    added or grow.
    """
    flat, shapes = double(values[0]).cpu(), list(network.layout.shapes.values())
    heads = shapes[len(network.trunk_names) :: 2]  # of the weights, each before its biases
    trunk = len(flat) - sum([(1 + width) * rows for rows, width in heads])
    place = torch.arange(len(flat))
    if heads:
        width, rows = heads[0][1], torch.tensor([rows for rows, _ in heads])
        sizes = torch.stack([rows * width, rows], 1).flatten()
        part = torch.arange(len(sizes)).repeat_interleave(sizes)
        number, bias = part // 2, part % 2 == 1
        own = torch.arange(len(part)) - (sizes.cumsum(0) - sizes)[part]
        row, column = torch.where(bias, own, own // width), torch.where(bias, width, own % width)
        place[trunk:] = trunk + number * HEAD + row * (width + 1) + column
        for k, unit in units.items():
            flat[trunk:] = torch.where(number == k, flat[trunk:] * unit[row % len(unit)], flat[trunk:])
    return place, flat


def counts(h: Tensor, fishers: Tensor) -> list[float]:
    """[K]: the counts c of the Fishers [K, m] in the curvature h [m]: see the top of this file."""
    found, free = fishers.new_zeros(len(fishers)), fishers.square().sum(1) > 0
    while bool(free.any()):  # each time, fewer are free
        some = fishers[free]
        size, together = some.square().sum(1).sqrt(), some.sum(0)
        common = (together @ h / together.square().sum()).clamp_min(0)
        spread, turn = torch.linalg.eigh(some @ some.T / size.outer(size))
        rest = turn.T @ (some @ (h - common * together) / size)
        found[:] = 0
        found[free] = common + turn @ torch.where(spread > APART, rest / spread, 0.0) / size
        if bool((found >= 0).all()):
            break
        free &= found > 0
    return found.tolist()
