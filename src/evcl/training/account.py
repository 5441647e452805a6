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

Of each task a sketch of SKETCH numbers is kept: weights that share a number are added with random signs, which keeps
products <H, F> right on average, and exactly so if no two share one. A random subset of the weights would miss the few
on which most of the product depends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

import torch
from torch import Tensor

from evcl import curvature
from evcl._core.devices import double
from evcl._core.errors import EvclError
from evcl._core.randomness import Purpose, generator
from evcl.methods import Fit, Fitted, Round, TaskData
from evcl.methods.applied import term_name
from evcl.methods.importance import drawn_points
from evcl.methods.method import Taught
from evcl.methods.terms import Quadratic
from evcl.nn import BayesianNetwork, Gaussian, outputs

SKETCH = 1024  # numbers kept per task; the error of a product is about sqrt(2 / SKETCH) of it
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
        fishers: task -> the sketch of its Fisher, [at most SKETCH] in float32; of many tasks, the first is of all up to
            this one
        counts: how often they count in the round that is learned, or was learned last
        units: head of numbers -> r^2 [D], for all changes of its scale, which multiplied its weights by r: a sketch has
            the units of the head's first task
        elbo: of that round, at its end, in nats: `elbo` = -`nll` - `kl`, the expected NLL of its rows under the
            posterior, and the divergence of the posterior from the round's prior; empty for point weights
    """

    fishers: Mapping[int, Tensor] = field(default_factory=dict)
    counts: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    elbo: Mapping[str, float] = field(default_factory=dict)
    units: Mapping[int, Tensor] = field(default_factory=dict)

    def rescaled(self, head: int, r: Tensor) -> Account:
        """After the weights of a head were multiplied by r [D]."""
        return replace(self, units={**self.units, head: self.units.get(head, 1.0) * double(r).cpu().square()})

    @classmethod
    def read(cls, saved: Mapping[str, Tensor], tasks: int) -> Account | None:
        """From a file's sketches, in their order; None if a task has none. Raises if one cannot be right."""
        units = {int(name[1:]): one for name, one in saved.items() if name[0] == "u"}
        fishers = {int(name): saved[name] for name in sorted(saved.keys() - {f"u{k}" for k in units}, key=int)}
        for one in (*fishers.values(), *(u.float() for u in units.values())):
            if one.dim() != 1 or len(one) > SKETCH or one.dtype != torch.float32 or not bool(one.isfinite().all()):
                raise EvclError("the sketches of its tasks' Fishers cannot be right")
        whole = list(fishers) == list(range(tasks))[-MAX_TASKS:]
        return cls(fishers, units=units) if whole else None

    def tensors(self) -> dict[str, Tensor]:
        """For a file: the inverse of `read`."""
        return {**{str(k): one for k, one in self.fishers.items()}, **{f"u{k}": one for k, one in self.units.items()}}

    def described(self, tasks: Sequence[str]) -> dict[str, object]:
        """For the record of a round after which there are these tasks."""
        first = "up to " if len(self.counts) == MAX_TASKS and min(self.counts) > 0 else ""
        rows = {
            (first if k == min(self.counts) else "") + tasks[k]: {**row, "sum": sum(row.values())}
            for k, row in self.counts.items()
        }
        return {**({"account": rows} if rows else {}), **({"elbo": dict(self.elbo)} if self.elbo else {})}

    @torch.no_grad()
    def begun(self, fit: Fit, round_: Round, first: Tensor | None) -> Account:
        """With the counts at the start of a round's fit. `first` [R, P]: the precision of the first prior."""
        known, parts = self.fishers, dict[str, Tensor]()
        if known:
            for name, h in _curvatures(fit, round_, first):
                one = round_.n * sketch(round_.network, h, self.units)
                parts[name] = parts[name] + one if name in parts else one
        each = {name: counts(h, torch.stack([padded(one) for one in known.values()])) for name, h in parts.items()}
        return replace(self, counts={k: {name: c[i] for name, c in each.items()} for i, k in enumerate(known)}, elbo={})

    @torch.no_grad()
    def ended(self, fit: Fit, fitted: Fitted, round_: Round) -> Account:
        """With the ELBO of the round, if the fit has a prior."""
        prior = next((term.prior for term in fit.terms if hasattr(term, "prior")), None)
        if prior is None or fitted.own.log_std is None:
            return self
        nll = 0.0
        for i, task in enumerate(round_.tasks):
            sources = round_.generators(Purpose.ACCOUNT, i)
            sample = measured_rows(task, round_, sources, fitted.network, fitted.q.mean)
            for point in drawn_points(
                Gaussian(fitted.q.mean, fitted.q.log_std), fitted.network.layout, ELBO_DRAWS, sources
            ):
                about = (fitted.network, point, fitted.network.layout, sample.x, [task.head])
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
        new: dict[int, Tensor] = {}
        for i, task in enumerate(round_.tasks):
            sources = round_.generators(Purpose.ACCOUNT, i)
            sample = measured_rows(task, round_, sources, round_.network, round_.posterior.mean)
            fisher = task.n * curvature.fisher(sample, likelihood=round_.likelihood)
            own = sketch(round_.network, fisher, self.units)
            new[task.task] = new.get(task.task, 0.0) + own
        every = {**self.fishers, **{k: _trimmed(one) for k, one in new.items()}}
        while len(every) > MAX_TASKS:
            oldest, second, *_ = every
            both = _trimmed(padded(every.pop(oldest)) + padded(every.pop(second)))
            every = {second: both, **every}
        return replace(self, fishers=every)


def measured_rows(
    task: TaskData, round_: Round, sources: list[torch.Generator], network: BayesianNetwork, mean: Tensor
) -> curvature.Sample:
    """Some rows of a task, at these weights over all of the network's."""
    width = network.classes(task.head) if round_.likelihood.heads else MEASURED_OUTPUTS // MIN_ROWS
    rows = task.drawn(sources, max(MIN_ROWS, MEASURED_OUTPUTS // width))
    data, from_below = task.seen_by(network)
    about = (network, mean, network.layout, [task.head], *data.take(rows), task.take_weights(rows), task.task)
    return curvature.Sample(*about, ranks=round_.ranks, from_below=from_below)


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
    network, mean, total = round_.network, round_.posterior.mean, torch.zeros_like(round_.posterior.mean)
    for i, task in enumerate(round_.tasks):
        for k, strength in zip(lesson.heads, lesson.strength, strict=True):
            own = round_.last_task(k) if network.task_weights is not None else task.task
            through = replace(task, head=k, task=task.task if own is None else own)
            sample = measured_rows(through, round_, round_.generators(Purpose.ACCOUNT, i), network, mean)
            w = strength.flatten(1).mean(1, keepdim=True) if isinstance(strength, Tensor) else strength
            bent = curvature.fisher(replace(sample, weights=None), temperature=lesson.temperature)
            total += task.n / round_.n * w * bent
    return total


def sketch(network: BayesianNetwork, values: Tensor, units: Mapping[int, Tensor]) -> Tensor:
    """[SKETCH] in float64, from curvatures [1, P], in these units. A weight keeps its place and its sign as heads are
    added or grow: it depends on the weight's name, and on its place in the tensor.
    """
    total, start, trunk = torch.zeros(SKETCH, dtype=torch.float64), 0, set(network.trunk_names)
    for name, view in network.layout.views(double(values[:1]).cpu()).items():
        flat = view.flatten()
        place = torch.arange(len(flat))
        if name in trunk:
            place, start = place + start, start + len(flat)
        else:  # a head: class by class, first its weights, then its bias
            owner, kind = name.rsplit(".", 1)
            k, width = int(owner.split()[1]), network.layout.shapes[f"{owner}.weight"][1]
            row, column = (place // width, place % width) if kind == "weight" else (place, width)
            place = start + (2 * k + row) * (width + 1) + column
            flat = flat * units[k][row] if k in units else flat
        sign = torch.randint(0, 2, (len(flat),), generator=generator(0, Purpose.ACCOUNT, crc32(name.encode()))) * 2 - 1
        total.index_add_(0, place % SKETCH, sign * flat)
    return total


def padded(one: Tensor) -> Tensor:
    return torch.nn.functional.pad(one.double(), (0, SKETCH - len(one)))


def _trimmed(one: Tensor) -> Tensor:
    """Without the zeros at its end: a small network does not fill a sketch."""
    used = one.nonzero()
    return one[: int(used[-1]) + 1 if len(used) else 0].float()


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
