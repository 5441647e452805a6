"""The contract of an update rule.

Once per fit, `Fit(rule=make)` calls make(q, variance, grads, pull, settings, rounded). `rounded` is a copy of means and
variances [S, R, P] in a lower precision that the rule updates too, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from evcl.nn import BayesianNetwork, Layout


class Rate:
    """A learning rate per replica, which can be scaled, and be 0 for some. `now` [R, 1] is the tensor that a CUDA graph
    reads at each step. On a CPU, `numbers` are its values, and `value` is one number if all replicas have the same.
    """

    def __init__(self, rate: Tensor | float, like: Tensor) -> None:
        column = torch.as_tensor(rate, dtype=like.dtype, device=like.device).expand(len(like), 1)
        self._base, self._factor = column.clone(memory_format=torch.contiguous_format), 1.0
        self.now, self.numbers = self._base.clone(), list[float]()
        self.value: Tensor | float = self.now
        self._set()

    def scale(self, factor: float) -> None:
        """From now on, it is `factor` times what it was at first."""
        if factor != self._factor:
            self._factor = factor
            self._set()

    def freeze(self, rows: Tensor) -> None:
        """From now on, it is 0 for the replicas for which `rows` [R] is True."""
        self._base.masked_fill_(rows.view(-1, 1), 0.0)
        self._set()

    def _set(self) -> None:
        torch.mul(self._base, self._factor, out=self.now)
        if not self.now.is_cuda:  # reading a value does not make the host wait
            self.numbers[:] = self.now.flatten().tolist()
            self.value = self.numbers[0] if len(set(self.numbers)) == 1 else self.now


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
