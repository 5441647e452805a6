"""The contract of an update rule. `Fit(rule=make)` calls make(q, variance, grads, pull, settings, low) once a fit."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Rule(Protocol):
    """Moves q and its variances, [R, P] each, in place, by the gradient in `grads` [S, R, P] and the springs of `pull`.

    `grads[1]` holds twice the gradient with respect to the variances. On a GPU a step is captured as a graph, unless
    the fit says otherwise: a rule then reads nothing on the host.
    """

    count: Tensor  # of steps taken, on the device

    def __call__(self) -> None:
        """Take a step."""

    def buffers(self) -> list[Tensor]:
        """Everything that a step changes, and what it reads."""
        ...

    def scale(self, factor: float) -> None:
        """From now on learning rates are this part of what the settings say."""

    def freeze(self, rows: Tensor) -> None:
        """The replicas where `rows` [R] is true move no more."""

    def resume(self, steps: int) -> None:
        """This many steps were taken; the buffers are as those left them."""
