"""Intervals and log-likelihoods of counts with this mean and standard deviation.

A Poisson rate that is itself uncertain, with a gamma distribution, makes a negative binomial: its variance is above its
mean. With mean m and variance s^2 > m, its parameters are r = m^2 / (s^2 - m) and p = m / s^2.
"""

from __future__ import annotations

from math import lgamma
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

NORMAL_FROM = 1000.0  # beyond this mean or deviation, a normal distribution is as good
MAX_SUMMED_COUNT = 5000  # the largest count that is added up: 4 deviations above both
VAGUE_RATIO = 10.0  # with a deviation above 1 and this many means, a negative binomial is 0 and hardly ever enormous
MIN_EXCESS = 1e-4  # the smallest excess of the variance over the mean, relative to the mean: a Poisson distribution

_log_factorial = np.vectorize(lambda value: lgamma(value + 1), otypes=[float])


def _parameters(mean: Floats, std: Floats) -> tuple[Floats, Floats]:
    mean = np.maximum(mean, 1e-12)
    variance = np.maximum(std**2, mean * (1 + MIN_EXCESS))
    return mean**2 / (variance - mean), mean / variance


def count_interval(means: ArrayLike, stds: ArrayLike, level: float) -> tuple[Floats, Floats]:
    """The smallest and largest count of intervals that contain the count with at least this probability."""
    mean, std = np.asarray(means, dtype=float), np.asarray(stds, dtype=float)
    wide = NormalDist().inv_cdf(0.5 + level / 2) * std
    low, high = np.maximum(0, np.floor(mean - wide)), np.ceil(mean + wide)
    small = (mean < NORMAL_FROM) & (std < NORMAL_FROM) & (std <= np.maximum(1, VAGUE_RATIO * mean))
    if small.any():
        r, p = (one[small] for one in _parameters(mean, std))
        tail = (1 - level) / 2
        ends = [np.zeros(len(r)), np.zeros(len(r))]
        log_probability = r * np.log(p)  # of large counts, the probability itself would underflow
        total = np.exp(log_probability)
        for k in range(1, MAX_SUMMED_COUNT):
            for end, wanted in zip(ends, (tail, 1 - tail), strict=True):
                end[total < wanted] = k
            if bool((total >= 1 - tail).all()):
                break
            log_probability += np.log((k - 1 + r) / k * (1 - p))
            total += np.exp(log_probability)
        low[small], high[small] = ends
    return low, high


def count_nll(mean: ArrayLike, std: ArrayLike, y: Floats) -> Floats:
    """-log p(y), in nats."""
    r, p = _parameters(np.asarray(mean, dtype=float), np.asarray(std, dtype=float))
    chosen: Floats = _log_factorial(y + r - 1) - _log_factorial(y) - _log_factorial(r - 1)
    return -(chosen + r * np.log(p) + y * np.log1p(-p))
