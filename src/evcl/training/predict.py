"""Predictions: averages over draws of the weights that are fixed by the seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from evcl._core.randomness import generator
from evcl.nn import BayesianNetwork, Gaussian, head_names


def draws(
    network: BayesianNetwork, q: Gaussian, seeds: Sequence[int], samples: int, heads: Iterable[int]
) -> Iterator[Tensor]:
    """The weight draws [R, P] of a prediction through these heads; each a function of the seed, whatever the heads."""
    mean, log_std = q.mean, q.log_std
    if log_std is None:
        yield mean
        return
    spans = network.layout.spans
    trunk = max((spans[name].stop for name in network.trunk_names), default=0)
    parts = {-1: slice(0, trunk)}
    for k in heads:
        names = head_names(k)
        parts[k] = slice(spans[names["weight"]].start, spans[names["bias"]].stop)
    distinct = sorted(set(seeds))
    own = torch.tensor([distinct.index(seed) for seed in seeds], device=mean.device)
    for draw in range(samples):
        weights = mean.clone()
        for k, span in parts.items():
            noise = torch.empty(len(distinct), span.stop - span.start, dtype=mean.dtype)
            for row, seed in zip(noise, distinct, strict=True):  # on the CPU, so that every device predicts the same
                row.normal_(generator=generator(seed, "predict", draw, k))
            weights[:, span] += log_std[:, span].exp() * noise.to(mean.device)[own]
        yield weights
