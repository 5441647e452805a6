"""The contract of an update rule.

Once per fit, `Fit(rule=make)` calls make(q, variance, grads, pull, settings, rounded). `rounded` is a copy of means and
variances [S, R, P] in a lower precision that the rule updates too, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from evcl.nn import BayesianNetwork, Layout


class Rule(Protocol):
    """Updates q and its variances, [R, P] each, in place, from the gradient in `grads` [S, R, P] and the springs
    `pull`.

    `grads[1]` holds twice the gradient with respect to the variances. On a GPU, a step is captured as a CUDA graph
    unless the fit has capture=False: a rule then must not read anything on the host.
    """

    count: Tensor  # number of steps taken, on the device

    def __call__(self) -> None:
        """Take a step."""

    def buffers(self) -> list[Tensor]:
        """Every tensor that a step changes or reads."""
        ...

    def scale(self, factor: float) -> None:
        """From now on, learning rates are `factor` times those of the settings."""

    def freeze(self, rows: Tensor) -> None:
        """Stop updating the replicas for which `rows` [R] is True."""

    def resume(self, steps: int) -> None:
        """Continue after this many steps; the buffers have been restored."""


@runtime_checkable
class Estimating(Rule, Protocol):
    """A rule that also computes the gradient that it uses, in place of the gradient by local reparameterisation."""

    passes: int  # how often a step computes the gradient and updates, on the same examples
    means: list[Tensor]  # what `source` fills with means over the examples, beside `grads`

    def begin(self, examples: int) -> None:
        """A step begins, on this many examples."""

    def end(self) -> None:
        """The fit has ended."""

    def source(self, network: BayesianNetwork, layout: Layout, pool: Any, at: Callable[..., Any]) -> Callable[..., Any]:
        """Return (rows [R, B], noise) -> NLL [R], which writes means over these examples into `grads` and `means`.
        Processes that share a batch then average these.

        `pool` holds the examples. at(theta [1, R, P], into [1, R, P]) makes such a function for the gradient at point
        weights: it writes that of the mean NLL and the losses, at the present values of `theta`, into `into`.
        """
        ...
