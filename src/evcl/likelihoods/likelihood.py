"""The contract of a likelihood p(y | outputs)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Objective(Protocol):
    """What a fit minimises: -log p(y | outputs), or a bound on it, for the concatenated outputs [M, o] of the heads.

    `columns` [M, 2] holds the first and end column of the outputs of each example's head; None: there is one head.
    """

    @property
    def compiled(self) -> bool:
        """Whether nn/chain.py, native.c and the GPU kernels compute this likelihood."""
        ...

    def nll(self, outputs: Tensor, y: Tensor, columns: Tensor | None) -> Tensor:
        """[M]: -log p(y | outputs)."""
        ...


class Likelihood(Objective, Protocol):
    """p(y | outputs), for outputs that predictions and the Fisher are made from."""

    def predict(self, outputs: Tensor) -> Tensor:
        """[M, ...]: the prediction from one draw of the weights; final predictions average this over draws."""
        ...

    def score(self, predicted: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """[R, N] each: the NLL and the correctness of averaged predictions [R, N, ...] for y [R, N]."""
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
        """Scalars whose per-example gradients, squared and summed, give the Fisher for outputs [R, n, o]."""
        ...

    def skip_labels(self, outputs: Tensor, generators: Sequence[torch.Generator] | None) -> None:
        """Advance the generators as `fisher_targets` of kind `sampled` would for outputs of this shape."""
        ...
