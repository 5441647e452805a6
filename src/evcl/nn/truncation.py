"""Rank reduction of a trained layer (LASER, Sharma et al., 2024): its weight becomes the nearest one of low rank.

    W = U S V^T,    W_r = sum over the r largest singular values of s_k u_k v_k^T

There is no training. Sharma et al. find that a late layer of a large language model can lose most of its rank, and that
the model becomes better by it. Choose the layer and the rank on validation data.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
from torch import Tensor

from evcl._core.devices import double
from evcl._core.errors import EvclError

L_co = TypeVar("L_co", covariant=True)


class Truncating(Protocol[L_co]):
    """A learner of type L_co."""

    def truncated(self, layer: str, rank: float) -> L_co: ...


def truncate(learner: Truncating[L_co], layer: str, rank: float) -> L_co:
    """A copy of the learner in which the weight of one layer has at most this rank; the learner itself is unchanged.

    `layer` is the layer's name in the network, such as "encoder.layer.5.output.dense", of a layer that learns or of a
    frozen one. `rank` is a number of singular values to keep, or below 1 a fraction of them. For a layer that learns,
    the means are truncated, and the standard deviations stay. A prior or anchor that is the posterior is truncated with
    it, so that the next task starts from there.
    """
    return learner.truncated(layer, rank)


def low_rank(weight: Tensor, layer: str, rank: float) -> Tensor:
    """The nearest weight [o, ...] of at most this rank, as a matrix [o, all others]."""
    if weight.dim() < 2:
        raise EvclError(f"{layer!r} has a weight of {weight.dim()} axis, which has no rank: choose a linear layer")
    flat = weight.flatten(1)
    most = min(flat.shape)
    number = isinstance(rank, (int, float)) and not isinstance(rank, bool)
    if not number or not (0 < rank < 1 or (rank == int(rank) and 1 <= rank <= most)):
        raise EvclError(f"rank must be from 1 to {most} for {layer!r}, or a fraction above 0 and below 1, not {rank!r}")
    k = int(rank) if rank >= 1 else max(1, round(rank * most))
    u, s, vh = torch.linalg.svd(double(flat), full_matrices=False)
    truncated: Tensor = (u[:, :k] * s[:k]) @ vh[:k]
    return truncated.to(weight).view_as(weight)
