"""The terms that a method adds to the mean NLL of a task, and their gradients.

`loss(q)` returns a term's value for R replicas. Terms with closed-form gradients, such as the KL and the elastic term,
never enter autograd: at the start of a task they collapse into the constants a, m, k, s, d and u of each weight. With
v = sigma^2,

    grad_mean    = a (mu - m)
    grad_log_std = k (v - s) + d v (v - u)

so that a step costs the same for every method. Both gradients are written as differences from a centre, not, say, as
a mu + b. A weight without data rests at its centre, where a difference is exactly 0. A sum would leave a rounding
error there, which Adam turns into a full step.

A term of your own needs only `loss`, which is differentiated by autograd at each step. If its gradient is known, it can
add it in place with `add_gradient`. Either way the gradient is added to that of the data before the update, and the
compiled update stays in use. `autograd_gradients` differentiates any term; it is the reference in the tests.

Terms are dataclasses. A tensor [R, P] in a term covers all weights, and is narrowed to the weights that a fit uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from evcl.nn import Gaussian, Layout

Number = Tensor | float  # one number for all replicas, or [R, 1]


class Term(Protocol):
    """A term added to the mean NLL. Its value is reported under `name`, if it has one."""

    def loss(self, q: Gaussian) -> Tensor:
        """[R]: the term's value for each replica at the posterior `q`."""
        ...


@runtime_checkable
class Quadratic(Term, Protocol):
    """A term whose gradients are springs: linear in the distance from a centre."""

    def springs(self) -> Springs: ...


class Gradients(NamedTuple):
    """The gradient of a step, over the weights of a fit.

    Attributes:
        mean: [R, P], with respect to the means
        variance: [R, P], twice the gradient with respect to the variances v, which is d/d log sigma over v
        layout: the names of the weights
    """

    mean: Tensor
    variance: Tensor | None
    layout: Layout

    def part(self, name: str) -> Tensor:
        """The gradient of the means of this name: a view [R, *shape]."""
        return self.layout.view(self.mean, name)


@dataclass
class Spring:
    """w (z - c) for each weight: a spring with stiffness w [R, P] and centre c [R, P]."""

    w: Tensor
    c: Tensor

    def __add__(self, other: Spring) -> Spring:
        w = self.w + other.w
        share = torch.where(w > 0, other.w / w, torch.zeros_like(w))
        return Spring(w, self.c + share * (other.c - self.c))  # exact if both centres are equal


@dataclass
class Springs:
    """The constants of the closed-form gradients; None for a part that no term has."""

    mean: Spring | None = None  # a (mu - m)
    linear: Spring | None = None  # k (v - s)
    square: Spring | None = None  # d v (v - u)

    def __add__(self, other: Springs) -> Springs:
        pairs = ((self.mean, other.mean), (self.linear, other.linear), (self.square, other.square))
        return Springs(*(x if y is None else y if x is None else x + y for x, y in pairs))

    def finite(self) -> bool:
        parts = (self.mean, self.linear, self.square)
        return all(bool(part.w.isfinite().all()) for part in parts if part is not None)

    def add_mean_gradient(self, mean: Tensor, grad: Tensor, scratch: Tensor) -> None:
        """grad += a (mu - m), in place."""
        if self.mean is not None:
            grad.addcmul_(self.mean.w, torch.sub(mean, self.mean.c, out=scratch))

    def add_log_std_gradient(self, variance: Tensor, grad: Tensor, scratch: Tensor, second: Tensor) -> None:
        """grad += k (v - s) + d v (v - u), in place; as (k + d v) (v - s) if both centres are the same tensor."""
        linear, square = self.linear, self.square
        if linear is not None and square is not None and linear.c is square.c:
            torch.addcmul(linear.w, square.w, variance, out=second)
            grad.addcmul_(second, torch.sub(variance, linear.c, out=scratch))
            return
        if linear is not None:
            grad.addcmul_(linear.w, torch.sub(variance, linear.c, out=scratch))
        if square is not None:
            torch.sub(variance, square.c, out=scratch).mul_(variance)
            grad.addcmul_(square.w, scratch)
