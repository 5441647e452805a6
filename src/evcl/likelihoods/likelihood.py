"""The contract of a likelihood p(y | outputs)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor


class Estimate(NamedTuple):
    """How a Fisher is estimated: `kind` exact, over all targets; sampled, with drawn ones; or empirical, with the true
    ones. `temperature`: a number, or [R, 1] for R replicas; it divides the logits.
    """

    kind: str = "exact"
    generators: Sequence[torch.Generator] | None = None
    temperature: Tensor | float = 1.0

    def cooled(self, logits: Tensor) -> Tensor:
        """The logits [R, n, o] divided by the temperature."""
        by = self.temperature
        return logits / (by.unsqueeze(2) if isinstance(by, Tensor) else by)


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
    """p(y | outputs), for outputs that predictions and the Fisher are made from.

    Targets other than classes are y [..., D], and D outputs of a head explain them. If `beside` is True, D further
    columns follow the head's own: numbers that are measured instead of learned by gradients (see `nn/number_head.py`).
    """

    @property
    def name(self) -> str:
        """What `evcl.Learner` and files call it."""
        ...

    @property
    def beside(self) -> bool:
        """Whether each output has a measured number beside it."""
        ...

    def predict(self, outputs: Tensor) -> Tensor:
        """[M, ...]: the prediction from one draw of the weights; final predictions average this over draws."""
        ...

    def score(self, predicted: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """[R, N] each: the NLL and the correctness of averaged predictions [R, N, ...] for y [R, N, ...]."""
        ...

    def fisher_targets(self, outputs: Tensor, y: Tensor, weights: Tensor, how: Estimate) -> list[Tensor]:
        """Scalars whose per-example gradients, squared and summed, give the Fisher for outputs [R, n, o]."""
        ...

    def skip_labels(self, outputs: Tensor, generators: Sequence[torch.Generator] | None) -> None:
        """Advance the generators as `fisher_targets` of kind `sampled` would for outputs of this shape."""
        ...


class Stateless:
    """A base class of likelihoods: there is one object of each, and a copy is the object itself. So a check such as
    `likelihood is CATEGORICAL` also holds in a copy of a learner.
    """

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def own_columns(outputs: Tensor, columns: Tensor | None) -> Tensor:
    """[M, o of one head]: the outputs of each example's head, out of those of all heads; all have equally many."""
    if columns is None:
        return outputs
    width = int(columns[0, 1] - columns[0, 0])
    if bool((columns[:, 1] - columns[:, 0] != width).any()):
        raise ValueError("heads that are learned together must have equally many outputs")
    return outputs.gather(1, columns[:, :1] + torch.arange(width, device=outputs.device))


def weighted(each: Tensor, weights: Tensor | None) -> Tensor:
    """[R]: the mean of numbers [R, n, D] over examples of these weights [R, n], and over D."""
    each = each.mean(2)
    return each.mean(1) if weights is None else (weights * each).sum(1) / weights.sum(1).clamp_min(1e-12)


def known(noise: Tensor, epistemic: Tensor, weights: Tensor | None) -> Tensor:
    """[R], from 0 to 1: the mean of min(1, noise / epistemic) over examples, for variances [R, n, D]."""
    return weighted(
        noise / torch.maximum(noise, epistemic).clamp_min(1e-30), None if weights is None else weights.to(noise)
    )


def draw(shape: tuple[int, ...], like: Tensor, generators: Sequence[torch.Generator] | None, normal: bool) -> Tensor:
    """Standard normal or uniform draws [R, ...], one generator per replica; on the CPU, whatever the device."""
    if generators is None:
        raise ValueError("a sampled Fisher needs generators")
    make = torch.randn if normal else torch.rand
    return torch.stack([make(shape[1:], generator=g, dtype=like.dtype) for g in generators]).to(like.device)
