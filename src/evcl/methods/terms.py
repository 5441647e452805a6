"""The terms that a method adds to the mean NLL of a task, and their gradients.

`loss(q)` returns a term's value for R replicas. The terms in this file have closed-form gradients, so they never enter
autograd: at the start of a task they collapse into the constants a, m, k, s, d and u of each weight. With v = sigma^2,

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

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from evcl.nn import Gaussian, Layout


class Term(Protocol):
    """A term added to the mean NLL. Its value is reported under `name`, if it has one."""

    def loss(self, q: Gaussian) -> Tensor:
        """[R]: the term's value for each replica at the posterior `q`."""
        ...


@runtime_checkable
class Quadratic(Term, Protocol):
    """A term whose gradients are springs: linear in the distance from a centre."""

    def springs(self) -> Springs: ...


@runtime_checkable
class Differentiated(Term, Protocol):
    """A term that computes its own gradient."""

    def add_gradient(self, q: Gaussian, grads: Gradients) -> None:
        """Add the gradient to `grads` in place, with tensor operations only."""
        ...


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


def term_name(term: object) -> str:
    """The name under which a term's value is reported: its `name`, or else its class name."""
    return str(getattr(term, "name", type(term).__name__.lower()))


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


@dataclass(frozen=True)
class KL:
    """weight * KL(q || prior); weight = beta / N. `means` [R, P] is a factor on its part (mu - mu*)^2 / (2 s2*)."""

    prior: Gaussian
    weight: Tensor | float
    means: Tensor | None = None
    name: ClassVar[str] = "kl"

    def loss(self, q: Gaussian) -> Tensor:
        weight = self.weight.reshape(-1) if isinstance(self.weight, Tensor) else self.weight
        whole, variance = q.kl(self.prior), self.prior.variance()
        if self.means is not None and variance is not None:
            whole = whole - 0.5 * ((1 - self.means) * (q.mean - self.prior.mean).square() / variance).sum(1)
        return weight * whole

    def springs(self) -> Springs:
        """a = k = weight / s; the centres are the prior's means and variances."""
        variance = self.prior.variance()
        assert variance is not None
        precision = self.weight / variance
        pull = precision if self.means is None else self.means * precision
        return Springs(Spring(pull, self.prior.mean), Spring(precision, variance))


@dataclass(frozen=True)
class Elastic:
    """1/2 sum_p importance_p [(mu_p - mu*_p)^2 + (s2_p - s2*_p)^2]; for point weights, without the second square.

    `variances` is the importance of the second square, if it is another.
    """

    anchor: Gaussian
    importance: Tensor
    variances: Tensor | None = None
    name: ClassVar[str] = "elastic"

    def loss(self, q: Gaussian) -> Tensor:
        moved = self.importance * (q.mean - self.anchor.mean).square()
        variance, anchored = q.variance(), self.anchor.variance()
        if variance is not None and anchored is not None:
            moved = moved + self._second() * (variance - anchored).square()
        return 0.5 * moved.sum(1)

    def springs(self) -> Springs:
        """a = importance, d = 2 importance; the centres are the anchor's means and variances."""
        variance = self.anchor.variance()
        mean = Spring(self.importance, self.anchor.mean)
        return Springs(mean) if variance is None else Springs(mean, square=Spring(2 * self._second(), variance))

    def _second(self) -> Tensor:
        return self.importance if self.variances is None else self.variances


def collapse(terms: Iterable[Term]) -> tuple[Springs | None, list[Term]]:
    """Combine the springs of all terms that have them; return the result and the remaining terms."""
    pull: Springs | None = None
    rest: list[Term] = []
    for term in terms:
        if isinstance(term, Quadratic):
            pull = term.springs() if pull is None else pull + term.springs()
        else:
            rest.append(term)
    linear, square = (None, None) if pull is None else (pull.linear, pull.square)
    if linear is not None and square is not None and torch.equal(linear.c, square.c):
        square.c = linear.c  # one tensor for both, which `add_log_std_gradient` checks for
    return pull, rest


def add_gradients(terms: Iterable[Term], q: Gaussian, grads: Gradients, variance: Tensor | None) -> None:
    """Add the gradients of these terms to `grads`: with their own `add_gradient`, or else by autograd.

    `variance` is q's variance, which the step has already computed.
    """
    by_autograd = []
    for term in terms:
        if isinstance(term, Differentiated):
            term.add_gradient(q, grads)
        else:
            by_autograd.append(term)
    if by_autograd:
        mean, log_std = autograd_gradients(by_autograd, q)
        grads.mean.add_(mean)
        if grads.variance is not None and log_std is not None and variance is not None:
            grads.variance.addcdiv_(log_std, variance)


def autograd_gradients(terms: Iterable[Term], q: Gaussian) -> tuple[Tensor, Tensor | None]:
    """The gradients of the sum of the terms with respect to mean and log_std, by autograd."""
    with torch.enable_grad():
        mean = q.mean.detach().requires_grad_()
        log_std = None if q.log_std is None else q.log_std.detach().requires_grad_()
        point = Gaussian(mean, log_std, q.layout)
        total = sum((term.loss(point).sum() for term in terms), mean.new_zeros(()))
        wanted = [mean] if log_std is None else [mean, log_std]
        if not total.requires_grad:
            zeros = [torch.zeros_like(w) for w in wanted]
            return zeros[0], zeros[1] if log_std is not None else None
        grads = torch.autograd.grad(total, wanted, materialize_grads=True)
    return grads[0], grads[1] if log_std is not None else None
