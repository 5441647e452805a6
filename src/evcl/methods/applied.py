"""What a training loop does with the terms, losses and trackers of a fit, and what it computes faster if it can."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from evcl.methods.method import Loss, Tracker
from evcl.methods.terms import Gradients, Quadratic, Springs, Term
from evcl.nn import Gaussian, Part


@runtime_checkable
class Differentiated(Term, Protocol):
    """A term that computes its own gradient."""

    def add_gradient(self, q: Gaussian, grads: Gradients) -> None:
        """Add the gradient to `grads` in place, with tensor operations only."""
        ...


class LogitLoss(Loss):
    """A loss of nothing but the logits of the data's heads. In an MLP with plain weights, it is computed in the
    compiled pass. `heads` are those of the data, in ascending order.
    """

    def of_logits(self, z: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The loss [R], and its gradient with respect to the logits z [R, B, columns] of the examples `rows`."""
        raise NotImplementedError


def begin_tracker(tracker: Tracker, q: Gaussian, part: Part) -> None:
    """Call `tracker.begin(q, part)`, or begin(q) of a tracker that was written before there was a `part`."""
    if len(inspect.signature(tracker.begin).parameters) > 1:
        tracker.begin(q, part)
        return
    name = type(tracker).__name__
    message = f"{name}.begin(q) is deprecated and stops working in evcl 0.4: write {name}.begin(q, part)"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    tracker.begin(q)  # type: ignore[call-arg]


def term_name(term: object) -> str:
    """The name under which a term's value is reported: its `name`, or else its class name."""
    return str(getattr(term, "name", type(term).__name__.lower()))


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
