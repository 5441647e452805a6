"""The contract of a likelihood p(y | outputs)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Likelihood(Protocol):
    """p(y | outputs), for outputs [M, o] of the heads side by side.

    `columns` [M, 2] says where the outputs of an example's own head begin and end; None: there is one head.
    """

    compiled: bool  # whether nn/chain.py, native.c and the GPU kernels compute this likelihood

    def nll(self, outputs: Tensor, y: Tensor, columns: Tensor | None) -> Tensor:
        """[M]: -log p(y | outputs)."""
        ...

    def predict(self, outputs: Tensor) -> Tensor:
        """[M, ...]: what is predicted by one draw of the weights; predictions average this over draws."""
        ...

    def score(self, predicted: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """[R, N] each: the NLL and whether it is right, of averaged predictions [R, N, ...] for y [R, N]."""
        ...

    def fisher_targets(
        self,
        outputs: Tensor,
        y: Tensor,
        weights: Tensor,
        kind: str,
        generators: Sequence[torch.Generator] | None,
        temperature: Tensor | float,
    ) -> list[Tensor]:
        """Sums whose gradients, squared example by example, add up to the Fisher of outputs [R, n, o]."""
        ...

    def skip_labels(self, outputs: Tensor, generators: Sequence[torch.Generator] | None) -> None:
        """Advance the generators as `fisher_targets` of kind `sampled` would for outputs of this shape."""
        ...
