"""Targets other than classes within a session: their heads, and the scale on which a network learns them.

A network learns numbers as z = (y - m) / s, where m and s are the mean and the deviation of all targets that the head
has learned from. A task with another mean or scale changes them to m' and s'. A head is linear, so the same function on
the new scale is known exactly: with r = s / s', its weights and their standard deviations are multiplied by r, and
its bias becomes r b + (m - m') / s'. The Fisher of these weights is divided by r^2, and the noise multiplied by r^2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl.methods import TaskData
from evcl.methods.memory import rescaled
from evcl.nn import head_names
from evcl.targets import Gaussian, Poisson

if TYPE_CHECKING:
    from evcl.training.run import Run
    from evcl.training.session import Given, Session

REMEMBERED, LEAST = 2, 200  # earlier errors count as this many times the rows of the last task, and at least as LEAST
FAR, FEW = 10, 20  # a target is far outside if it is this many times the range away; fewer rows than FEW tell no range
TRUSTED = 10  # the noise of training counts as this many rows beside those that were predicted before being learned


class Scale(NamedTuple):
    """What is known of the targets of a head; all tensors are [D] in float64."""

    rows: float
    mean: Tensor
    std: Tensor  # above 0
    errors: Tensor  # sum over rows of their squared errors before they were learned; earlier tasks count less
    tested: float  # the number of these rows
    tasks: int  # how many tasks were predicted before they were learned; 0: `errors` are of parts of the first task

    def noise(self, learned: Tensor) -> Tensor:
        """[N, D]: the variance of new rows around the prediction, `learned` [N, D] being that of rows learned from.

        If targets drift, the rows that come next lie farther away, as those of each task did before it was learned. And
        errors on new rows are larger than on rows that were learned from. So what counts is errors on new rows.
        """
        return (self.errors.to(learned.device) + TRUSTED * learned) / (self.tested + TRUSTED)

    def tested_on(self, errors: Tensor, first: bool) -> Scale:
        """After the rows of a task had these squared errors [n, D] before they were learned. `first`: they are of parts
        of the head's first task, which say nothing about drift, so those of the next task replace them.
        """
        n = len(errors)
        keep = min(1.0, max(REMEMBERED * n, LEAST) / max(self.tested, 1.0)) if self.tasks else 0.0
        total = keep * self.errors + errors.sum(0).clamp_min(0).cpu()
        return self._replace(errors=total, tested=keep * self.tested + n, tasks=self.tasks + (not first))

    def standardised(self, y: Tensor) -> Tensor:
        return (y - self.mean.to(y.device)) / self.std.to(y.device)

    def restored(self, z: Tensor) -> Tensor:
        return self.mean.to(z.device) + self.std.to(z.device) * z


def first_scale(outputs: int) -> Scale:
    """The scale of targets that are learned as they are."""
    none = torch.zeros(outputs, dtype=torch.float64)
    return Scale(0.0, none, torch.ones_like(none), none, 0.0, 0)


def far_outside(y: Tensor, ends: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """[N, D]: which targets y [N, D] are far outside the others, as mistyped ones are: more than 10 times the range of
    the rest away from it. The rest is all except one in a hundred at each end, and at least one. `ends`: its range, if
    that is known (see `usual_range`).
    """
    low, high = ends or usual_range(y)
    wide = FAR * (high - low)
    return ((y < low - wide) | (y > high + wide)) & (wide > 0)


def limited(y: Tensor, ends: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The targets y [N, D], with those far outside put on the end of the range of the others. Otherwise a single one
    would decide the scale, the noise, and that all earlier rows were wrong.
    """
    ends = ends or usual_range(y)
    return torch.where(far_outside(y, ends), y.clamp(*ends), y)


def usual_range(y: Tensor) -> tuple[Tensor, Tensor]:
    """[D] each: the ends of the range of y [N, D] without one in a hundred at each end."""
    out = max(1, len(y) // 100) if len(y) >= FEW else 0
    ordered = y.sort(0).values
    return ordered[out], ordered[-1 - out]


def prepared(session: Session, task: Given, number: int) -> TaskData:
    """A task's data on the run's device, its targets on the scale of the head, which is made or rescaled."""
    run, name, y = session.run, task.head, task.y
    assert isinstance(y, Tensor)
    outputs = y.shape[2]
    known = session.heads.get(name)
    if known is not None and len(known) != outputs:
        raise EvclError(f"its head has {len(known)} targets per example, but this task has {outputs}")
    if known is None:
        k = run.add_head(session.features(task), outputs)
        session.heads[name] = list(range(outputs))
        session.groups[name] = [session.group(k, list(range(outputs)))]
        session.shown[name] = [set(range(outputs))]
    session.domains[task.name], session.lacking = 0, []
    k = session.groups[name][0].number
    before = session.scales.get(name, first_scale(outputs))
    scale, w = before, _counted(y[0], None if task.weights is None else task.weights[0])
    if isinstance(run.likelihood, Gaussian):
        scale = _merged(before, y[0], w)
        if before.rows:
            _rescale(run, k, before, scale)
    elif isinstance(run.likelihood, Poisson) and not before.rows:
        usual = (w * y[0]).sum(0).div(w.sum()).clamp_min(1 / (1 + y.shape[1])).log()
        head = run.network.number_head(k)
        head.beside = usual.to(head.beside).expand_as(head.beside).clone()
    session.scales = {**session.scales, name: scale._replace(rows=before.rows + y.shape[1])}
    run.add_film(number + 1)
    mean = run.network.posterior.mean
    weights = None if task.weights is None else task.weights.to(mean)
    return TaskData(task.x.to(mean), scale.standardised(y).to(mean), k, weights, number)


def expect(run: Run, k: int, errors: Tensor, scale: Scale) -> None:
    """Let the fit of rows that have these squared errors [n, D] begin with a noise of at least that size. With the
    noise of earlier tasks, its first gradients would be so large that Adam's steps would be too small ever after.
    """
    if isinstance(run.likelihood, Gaussian):
        head = run.network.number_head(k)
        size = (errors.mean(0).cpu() / scale.std.square()).clamp_min(1e-12).log()
        head.least = size.to(head.beside)


def _counted(y: Tensor, weights: Tensor | None) -> Tensor:
    """[N, 1]: how much each row of y [N, D] counts."""
    return y.new_ones(len(y), 1) if weights is None else weights.to(y).unsqueeze(1)


def _merged(before: Scale, y: Tensor, w: Tensor) -> Scale:
    """The mean and deviation of the earlier targets and of y [N, D], with the weights w [N, 1]."""
    n, m = before.rows, float(len(y))
    mean = (w * y).sum(0) / w.sum()
    variance = (w * (y - mean).square()).sum(0) / w.sum()
    a, b, step = n / (n + m), m / (n + m), mean - before.mean
    both = a * before.std.square() * (n > 0) + b * variance + a * b * step.square() * (n > 0)
    mean = before.mean + b * step if n else mean
    std = both.sqrt()
    least = 1e-9 * mean.abs()  # constant targets: what is left is rounding
    return before._replace(mean=mean, std=torch.where(std > least, std, before.std if n else torch.ones_like(std)))


def _rescale(run: Run, k: int, before: Scale, after: Scale) -> None:
    """Express head k on another scale of its targets, in the posterior and in the memories: the function it computes,
    and how sure it is of it, stay the same.
    """
    network, names = run.network, head_names(k)
    layout, like = network.layout, network.posterior.mean
    factor = torch.ones_like(like[:1])
    shift = torch.zeros_like(factor)
    r = (before.std / after.std).to(like)
    layout.view(factor, names["weight"]).copy_(r.view(1, -1, 1).expand_as(layout.view(factor, names["weight"])))
    layout.view(factor, names["bias"]).copy_(r.view(1, -1))
    layout.view(shift, names["bias"]).copy_(((before.mean - after.mean) / after.std).to(like).view(1, -1))
    network.number_head(k).rescale(r)

    def change(task: TaskData) -> TaskData:
        if task.head != k:
            return task
        return replace(task, y=after.standardised(before.restored(task.y.double())).to(task.y))

    held = rescaled((network.posterior, *run.memories), factor, shift, change)
    network.posterior, run.memories = held[0], tuple(held[1:])
    run._changed()
