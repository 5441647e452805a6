"""How important each weight is to a task: the measures that the setting `importance` chooses from.

`fisher`: the diagonal Fisher information (curvature/fisher.py). `si`: the path integral of synaptic intelligence
(Zenke, Poole and Ganguli, 2017). `mas`: the sensitivity of memory aware synapses (Aljundi et al., 2018). `kfac`, a
matrix per layer, is in kronecker.py.

The Fisher of n rows is a curvature in nats, so that `strength` 1 is Laplace's approximation. The others have no such
unit: a path integral grows with the learning rate, the number of steps and the noise of the gradient, and a
sensitivity with the size of the outputs. So each is multiplied by the number, one per replica and task, with which

    sum_i I_i = sum_i F_i

A random change of the weights, equally large in all directions, then costs as much as with the Fisher, whatever the
number of rows and the learning rate: `strength` and all settings of the Fisher keep their meaning, and `importance`
only chooses how the total is divided among the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from evcl import curvature
from evcl._core.randomness import GeneratorNoise, HostNoise, Noise, Purpose
from evcl._core.settings import Settings
from evcl.methods.data import TaskData
from evcl.methods.method import Fitted, Round, Tracker
from evcl.methods.teacher import Number
from evcl.methods.terms import Gradients
from evcl.nn import Gaussian, Layout, Part

T = TypeVar("T")
XI = 4.0  # xi over the mean of Delta^2: on permuted digits, values from 1 to 16 differed by 2 points


@dataclass(frozen=True)
class Importance:
    """A measure of importance.

    Attributes:
        measure: called after the fit of a task; [R, P] over all weights, at least 0, and 0 for weights that the fit did
            not use
        trackers: makes the trackers that the fit needs; `measure` finds their results in `fitted.tracked`
    """

    measure: Callable[[Fitted, Round, Settings], Tensor]
    trackers: Callable[[], Sequence[Tracker]] = tuple


def fisher(fitted: Fitted, round_: Round, s: Settings) -> Tensor:
    """[R, P]: the diagonal Fisher of the round's tasks over all weights; 0 for weights that the fit did not use."""
    total: Tensor | float = 0.0
    for i, task in enumerate(round_.tasks):
        total = total + _of_task(fitted, task, round_.generators(Purpose.FISHER, i), round_, s)
    return _widened(torch.as_tensor(total), fitted)


def _of_task(fitted: Fitted, task: TaskData, generators: list[torch.Generator], round_: Round, s: Settings) -> Tensor:
    """The Fisher of one task over the fit's weights."""
    found = torch.stack(estimates(curvature.fisher, fitted, task, generators, round_, s)).mean(0)
    return found * scale(found.sum(1, keepdim=True), fitted, task, s)


def scale(total: Tensor, fitted: Fitted, task: TaskData, s: Settings) -> Number:
    """What `fisher_scale` multiplies a task's Fisher by; `total` [R, 1] is its sum over the fit's weights."""
    if s.fisher_scale == "examples":  # to second order, the distillation loss on the task's rows
        return task.n * s.fisher_temperature**2
    if s.fisher_scale == "task":
        return sum(prod(shape) for shape in fitted.layout.shapes.values()) / total.clamp_min(1e-30)
    return 1.0


def divisor(n: int, s: Settings) -> int:
    """What a penalty on a task of n rows is divided by: n, or 1."""
    return n if "examples" in (s.strength_scale, s.fisher_scale) else 1


def estimates(
    measure: Callable[..., T],
    fitted: Fitted,
    task: TaskData,
    generators: list[torch.Generator],
    round_: Round,
    s: Settings,
) -> list[T]:
    """What `measure`, such as `curvature.fisher`, finds on `fisher_examples` examples of a task: at the point weights,
    at the posterior's means, or at each of several posterior draws.
    """
    sample = _sampled(fitted, task, s.fisher_examples, generators, round_)
    options = (s.fisher, generators, s.fisher_temperature, s.fisher_spread, round_.likelihood)
    drawn = s.fisher_draws and fitted.own.log_std is not None
    points = _drawn(fitted.own, fitted.layout, s.fisher_draws, generators) if drawn else [fitted.own.mean]
    return [measure(replace(sample, mean=point), *options) for point in points]


def _drawn(q: Gaussian, layout: Layout, draws: int, generators: list[torch.Generator]) -> list[Tensor]:
    """Posterior draws [R, P]. No number is drawn for padding, so that every device draws the same weights."""
    plain, points = Layout(layout.shapes), []
    for _ in range(draws):
        z = torch.stack([torch.randn(plain.size, generator=g, dtype=q.mean.dtype) for g in generators])
        points.append(q.draw(plain.gather(z.to(q.mean.device), layout)))
    return points


class PathIntegral(Tracker):
    """Omega_t of synaptic intelligence: omega_i / (Delta_i^2 + xi), which may be negative.

    omega_i = -sum over steps of g_i (theta'_i - theta_i) is how much the weight's own movement reduced the loss. g is
    the gradient of the NLL and of losses on the outputs, without the terms, at theta; theta' are the weights after the
    step, and Delta_i is the whole movement. For a Gaussian, theta are the means. If `xi` is None, it is XI times the
    mean of Delta^2 over the weights that moved, and so follows the scale of the weights.
    """

    def __init__(self, xi: Tensor | float | None = None) -> None:
        self.xi = xi

    def begin(self, q: Gaussian, part: Part) -> None:
        self.start, self.last = q.mean.clone(), q.mean.clone()
        self.omega, self.grad = torch.zeros_like(q.mean), torch.zeros_like(q.mean)

    def before(self, q: Gaussian, grads: Gradients) -> None:
        self.grad.copy_(grads.mean)

    def after(self, q: Gaussian) -> None:
        self.omega.addcmul_(self.grad, self.last.sub_(q.mean))
        self.last.copy_(q.mean)

    def buffers(self) -> list[Tensor]:
        return [self.start, self.last, self.omega, self.grad]

    def result(self) -> Tensor:
        moved = (self.last - self.start).square()
        xi = self.xi
        if xi is None:  # a fit that several methods share has weights that only the others use
            xi = (XI * moved.sum(1, keepdim=True) / (moved > 0).sum(1, keepdim=True).clamp_min(1)).clamp_min(1e-30)
        return self.omega / (moved + xi)


def sensitivity(fitted: Fitted, round_: Round, examples: int, spread: Tensor | float = 0.0) -> Tensor:
    """[R, P]: sum over the round's tasks of n_k mean_n |d ||f(x_n)||^2 / d theta|, f the outputs of the task's head."""
    total = torch.zeros_like(fitted.own.mean)
    for i, task in enumerate(round_.tasks):
        sample = _sampled(fitted, task, examples, round_.generators(Purpose.SENSITIVITY, i), round_)
        total += task.n * curvature.sensitivity(sample, spread)
    return _widened(total, fitted)


def _si(fitted: Fitted, round_: Round, s: Settings) -> Tensor:
    tracked = fitted.tracked[0]
    assert tracked is not None
    found = fitted.network.layout.gather(tracked.clamp_min(0), fitted.layout)
    about = (fitted.network, fitted.own.mean, fitted.layout)
    x = round_.tasks[0].x.expand(len(found), *round_.tasks[0].x.shape[1:])
    heads = list(dict.fromkeys(task.head for task in round_.tasks))
    found = curvature.spread_out(*about, found, x, heads, s.fisher_spread)
    return _scaled(_widened(found, fitted), fisher(fitted, round_, s))


def _mas(fitted: Fitted, round_: Round, s: Settings) -> Tensor:
    found = sensitivity(fitted, round_, s.fisher_examples, s.fisher_spread)
    return _scaled(found, fisher(fitted, round_, s))


def _scaled(importance: Tensor, like: Tensor) -> Tensor:
    """`importance` [R, P] times the number for which its sum over the weights is that of `like`."""
    return importance * (like.sum(1, keepdim=True) / importance.sum(1, keepdim=True).clamp_min(1e-30))


def _sampled(
    fitted: Fitted, task: TaskData, examples: int, generators: list[torch.Generator], round_: Round
) -> curvature.Sample:
    """Up to this many random examples of a task for each replica, at the means that a fit ended with."""
    rows = task.drawn(generators, examples)
    shown, from_below = task.seen_by(fitted.network)
    about = (fitted.network, fitted.own.mean, fitted.layout, [task.head], *shown.take(rows))
    noise = _latent_noise(generators, rows.device) if round_.likelihood.draws else None
    weights = task.take_weights(rows)
    return curvature.Sample(*about, weights, task.task, round_.ranks, from_below=from_below, noise=noise)


def _latent_noise(generators: list[torch.Generator], device: torch.device) -> Noise:
    """The noise of latent variables: one draw per example."""
    noise = GeneratorNoise(generators)
    return noise if device.type == "cpu" else HostNoise(noise)


def _widened(own: Tensor, fitted: Fitted) -> Tensor:
    """[R, P] over all weights from numbers for the fit's weights; 0 for the others."""
    whole = torch.zeros_like(fitted.q.mean)
    fitted.network.layout.scatter_(whole, fitted.layout, own)
    return whole


IMPORTANCE = {
    "fisher": Importance(fisher),
    "si": Importance(_si, trackers=lambda: [PathIntegral()]),
    "mas": Importance(_mas),
}
"""The measures by name that give one number per weight."""


def trackers(s: Settings) -> Sequence[Tracker]:
    """The trackers that a fit needs for the chosen measure."""
    return IMPORTANCE[s.importance].trackers() if s.importance in IMPORTANCE else ()
