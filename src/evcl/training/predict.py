"""Predictions: averages over draws of the weights, which are determined by the seed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from evcl._core.randomness import Purpose, generator
from evcl.nn import BayesianNetwork, Gaussian, head_names
from evcl.posterior.kronecker import KroneckerGaussian

KEPT_NUMBERS = 20_000_000  # largest size of weight draws that are kept: 80 MB in float32
NOISE_THREADS = 4  # threads that make a large network's next draws while a GPU computes, which needs less time for one


def weight_draws(
    network: BayesianNetwork, q: Gaussian | KroneckerGaussian, seeds: Sequence[int], samples: int, heads: Iterable[int]
) -> Iterator[Tensor]:
    """The weight draws [R, P] of a prediction through these heads; each depends on the seed, not on the heads."""
    mean = q.mean
    if isinstance(q, Gaussian) and q.log_std is None:
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

    def noise(draw: int) -> Tensor:
        """Made on the CPU, so that every device predicts the same."""
        z = torch.zeros(len(distinct), mean.shape[1], dtype=mean.dtype)  # 0 for other heads, which are not asked
        for k, span in parts.items():
            for row, seed in zip(z, distinct, strict=True):
                row[span].normal_(generator=generator(seed, Purpose.PREDICT, draw, k))
        return z

    slow = len(distinct) * mean.shape[1] > KEPT_NUMBERS // NOISE_THREADS and samples > 1
    for z in ahead(noise, samples) if slow and not mean.is_cpu else map(noise, range(samples)):
        yield q.draw(z.to(mean.device)[own])


def ahead(make: Callable[[int], Tensor], count: int) -> Iterator[Tensor]:
    """make(0), make(1), ...: threads make the next ones before they are asked for."""
    with ThreadPoolExecutor(NOISE_THREADS, "evcl-draws") as threads:
        coming: deque[Future[Tensor]] = deque()
        for i in range(count):
            coming.append(threads.submit(make, i))
            if len(coming) > NOISE_THREADS:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


def of_each(found: Tensor, sizes: Sequence[int], function: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of each head's part of the last axis [..., sum of sizes], concatenated again. Heads of one size are
    computed at once: there may be thousands.
    """
    if len(set(sizes)) == 1:
        return function(found.unflatten(-1, (len(sizes), -1))).flatten(-2)
    return torch.cat([function(part) for part in found.split(list(sizes), -1)], -1)
