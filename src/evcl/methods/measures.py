"""How important each weight is to a task: measures with a number per weight that take the place of the Fisher.

`si`: the path integral of synaptic intelligence (Zenke, Poole and Ganguli, 2017). `mas`: the sensitivity of memory
aware synapses (Aljundi et al., 2018). `kfac`, a matrix per layer, is in kronecker.py.

The Fisher of n rows is a curvature in nats, so that `strength` 1 is Laplace's approximation. The others have no such
unit: a path integral grows with the learning rate, the number of steps and the noise of the gradient, and a
sensitivity with the size of the outputs. So each is multiplied by the number, one per replica and task, with which

    sum_i I_i = sum_i F_i

A random change of the weights, equally large in all directions, then costs as much as with the Fisher, whatever the
number of rows and the learning rate: `strength` and all settings of the Fisher keep their meaning, and `importance`
only chooses how the total is divided among the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evcl import curvature
from evcl._core.randomness import Purpose
from evcl._core.settings import Settings
from evcl.methods.elastic_memory import FISHER, Importance
from evcl.methods.importance import fisher, sampled, widened
from evcl.methods.method import Fitted, Round, Tracker
from evcl.methods.terms import Gradients
from evcl.nn import Gaussian, Part

XI = 4.0  # xi over the mean of Delta^2: on permuted digits, values from 1 to 16 differed by 2 points


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
        sample = sampled(fitted, task, examples, round_.generators(Purpose.SENSITIVITY, i), round_)
        total += task.n * curvature.sensitivity(sample, spread)
    return widened(total, fitted)


def _si(fitted: Fitted, round_: Round, s: Settings) -> Tensor:
    tracked = fitted.tracked[0]
    assert tracked is not None
    importance = fitted.network.layout.gather(tracked.clamp_min(0), fitted.layout)
    about = (fitted.network, fitted.own.mean, fitted.layout)
    x = round_.tasks[0].x.expand(len(importance), *round_.tasks[0].x.shape[1:])
    heads = list(dict.fromkeys(task.head for task in round_.tasks))
    importance = curvature.spread_out(*about, importance, x, heads, s.fisher_spread)
    return _scaled(widened(importance, fitted), fisher(fitted, round_, s))


def _mas(fitted: Fitted, round_: Round, s: Settings) -> Tensor:
    importance = sensitivity(fitted, round_, s.fisher_examples, s.fisher_spread)
    return _scaled(importance, fisher(fitted, round_, s))


def _scaled(importance: Tensor, like: Tensor) -> Tensor:
    """`importance` [R, P] times the number for which its sum over the weights is that of `like`."""
    return importance * (like.sum(1, keepdim=True) / importance.sum(1, keepdim=True).clamp_min(1e-30))


IMPORTANCE = {"fisher": FISHER, "si": Importance(_si, lambda: [PathIntegral()]), "mas": Importance(_mas)}
"""The measures by name that give one number per weight."""


def trackers(s: Settings) -> Sequence[Tracker]:
    """The trackers that a fit needs for the chosen measure."""
    return IMPORTANCE[s.importance].trackers() if s.importance in IMPORTANCE else ()
