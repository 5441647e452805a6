"""What a method adds to the mean NLL of a task, and the gradients of it.

A term gives its value for R replicas by `loss(q)`. The terms of this file are quadratic in the mean and have
closed-form gradients, so they never enter autograd: at the start of a task they collapse into per-weight constants,

    grad_mean    = a (mu - m)
    grad_log_std = s2 (c + d s2) - e            s2 = sigma^2

whatever the method, so that a step costs the same for all of them. A term of one's own needs only `loss`: it is
differentiated by autograd at each step. `autograd_gradients` does that for any term; it is the reference in the tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from evcl.nn import Gaussian


class Term(Protocol):
    """Something added to the mean NLL."""

    def loss(self, q: Gaussian) -> Tensor:
        """[R]: the term's value for each replica at the posterior `q`."""
        ...


@runtime_checkable
class Quadratic(Term, Protocol):
    """A term whose gradients are known."""

    def pull(self) -> Pull: ...


@dataclass
class Pull:
    """The constants of the closed-form gradients: a, m, c, d are [R, P], e is a number or [R, 1].

    c, d and e belong to log sigma; they are None for weights without one. The mean is kept as a centre m, not as
    a*mu + b: in float32 that cancels badly.
    """

    a: Tensor
    m: Tensor
    c: Tensor | None = None
    d: Tensor | None = None
    e: Tensor | float = 0.0

    def __add__(self, other: Pull) -> Pull:
        a = self.a + other.a
        share = torch.where(a > 0, other.a / a, torch.zeros_like(a))
        m = self.m + share * (other.m - self.m)  # exact where the two centres are one
        return Pull(a, m, _sum(self.c, other.c), _sum(self.d, other.d), self.e + other.e)

    def add_mean_gradient(self, mean: Tensor, grad: Tensor, scratch: Tensor) -> None:
        """grad += a (mu - m), in place."""
        grad.addcmul_(self.a, torch.sub(mean, self.m, out=scratch))

    def log_std_gradient(self, variance: Tensor, grad_variance: Tensor, out: Tensor) -> None:
        """out = s2 (2 dNLL/ds2 + c + d s2) - e: the NLL's part by the chain rule, and this pull's."""
        if self.c is None:
            torch.mul(grad_variance, 2, out=out)
        else:
            torch.add(self.c, grad_variance, alpha=2, out=out)
        if self.d is not None:
            out.addcmul_(self.d, variance)
        out.mul_(variance).sub_(self.e)


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    if x is None or y is None:
        return y if x is None else x
    return x + y


@dataclass(frozen=True)
class KL:
    """weight * KL(q || prior); weight = beta / N."""

    prior: Gaussian
    weight: Tensor | float

    def loss(self, q: Gaussian) -> Tensor:
        return torch.as_tensor(self.weight).reshape(-1) * q.kl(self.prior)

    def pull(self) -> Pull:
        assert self.prior.log_std is not None
        precision = self.weight * (-2 * self.prior.log_std).exp()
        return Pull(a=precision, m=self.prior.mean, c=precision, e=self.weight)


@dataclass(frozen=True)
class Elastic:
    """1/2 sum_p importance_p [(mu_p - mu*_p)^2 + (s2_p - s2*_p)^2]; without the second part for point weights."""

    anchor: Gaussian
    importance: Tensor

    def loss(self, q: Gaussian) -> Tensor:
        moved = (q.mean - self.anchor.mean).square()
        variance, anchored = q.variance(), self.anchor.variance()
        if variance is not None and anchored is not None:
            moved = moved + (variance - anchored).square()
        return 0.5 * (self.importance * moved).sum(1)

    def pull(self) -> Pull:
        variance = self.anchor.variance()
        if variance is None:
            return Pull(a=self.importance, m=self.anchor.mean)
        d = 2 * self.importance
        return Pull(a=self.importance, m=self.anchor.mean, c=-d * variance, d=d)


def collapse(terms: Iterable[Term]) -> tuple[Pull | None, list[Term]]:
    """One pull for all the terms that have one, and the terms left to autograd."""
    pull: Pull | None = None
    rest: list[Term] = []
    for term in terms:
        if isinstance(term, Quadratic):
            pull = term.pull() if pull is None else pull + term.pull()
        else:
            rest.append(term)
    return pull, rest


def autograd_gradients(terms: Iterable[Term], q: Gaussian) -> tuple[Tensor, Tensor | None]:
    """The gradients of the terms' sum with respect to mean and log_std, by autograd."""
    with torch.enable_grad():
        mean = q.mean.detach().requires_grad_()
        log_std = None if q.log_std is None else q.log_std.detach().requires_grad_()
        point = Gaussian(mean, log_std)
        total = sum((term.loss(point).sum() for term in terms), mean.new_zeros(()))
        wanted = [mean] if log_std is None else [mean, log_std]
        if not total.requires_grad:
            zeros = [torch.zeros_like(w) for w in wanted]
            return zeros[0], zeros[1] if log_std is not None else None
        grads = torch.autograd.grad(total, wanted, materialize_grads=True)
    return grads[0], grads[1] if log_std is not None else None
