"""What a filter needs of a likelihood: the prediction from Gaussian outputs, and how far an observation moves them.

The outputs of a row are N(f, W), because the weights are uncertain. Both the prediction and the derivatives of the
log-likelihood average over them, so that an uncertain network neither predicts nor learns as if it were sure.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evcl.streams.arrays import (
    Array,
    Stateful,
    diagonal_matrices,
    diagonals,
    log,
    log_sigmoid,
    product,
    sigmoid,
    total,
    within,
)
from evcl.streams.filters import rooted
from evcl.streams.scaling import Scaling

Targets = NDArray[Any]  # of n rows: places of classes [n], or numbers [n, targets]
MIN_CLASS_PROBABILITY = 1e-4  # the probability below which a class gets no smaller curvature
PROBIT = math.pi / 8  # sigmoid(f) averaged over N(f, w) is about sigmoid(f / sqrt(1 + w pi / 8)) (MacKay, 1992)
MAX_LOG_RATE = 30.0  # the largest log rate
SOFTENINGS = (0.25, 0.5, 0.75)  # softer predictions are proportional to p^(1 - s)
SOFTENED_POWERS = 1 - np.array(SOFTENINGS)[:, None, None]
SURPRISING_DEVIATIONS = 5.0  # deviations of a count by which it is far above the predicted rate
MAX_SQUARED_ERROR = 9.0  # the largest squared error, in variances, that counts as evidence of a change


class Observing(Stateful):
    """One for each group of R networks. A prediction is an array [R, n, ...] whose last axis depends on the kind."""

    def predict(self, f: Array, w: Array) -> Array:
        """[R, n, ...]: the prediction for outputs f [R, n, K] with covariances w [R, n, K, K]."""
        raise NotImplementedError

    def log_likelihood(self, predicted: Array, y: Targets) -> Array:
        """[R, n]: the log of the predicted probability or density of y."""
        raise NotImplementedError

    def derivatives(self, predicted: Array, y: Targets) -> tuple[Array, Array]:
        """e [R, n, K] and B [R, n, K, K] (see filters.py)."""
        raise NotImplementedError

    def softer(self, predicted: Array, y: Targets) -> Array:
        """[s, n]: the log of q(y) / p(y) for predictions q less sure than p, one for each of `SOFTENINGS`."""
        raise NotImplementedError

    def surprise(self, predicted: Array, y: Targets) -> Array:
        """[n]: -log p(y) less its mean under p."""
        raise NotImplementedError

    def mixed(self, predicted: Array, shares: Array) -> Array:
        """[1, n, ...]: the prediction of experts [R, n, ...] with these shares [R]."""
        return mean_of(predicted, shares)

    # A kind whose noise is learned, or whose outputs are relative to the targets so far, has these as well.

    def learn(self, f: Array, variance: Array, a: Array, b: Array, root: Array, y: Targets, kept: Array) -> None:
        """Learn the noise, from the outputs before the rows, their V, and how the rows move them (see filters.py);
        `kept` [R] is the part of what is known to keep after each row.
        """

    def follow(self, scaling: Scaling, standardized: bool) -> None:
        """The targets so far have this mean and deviation, and are learned as they are or `standardized`."""

    def copy(self, target: int, source: int) -> None:
        """Network `target` has the noise of network `source`."""

    def reset(self, targets: NDArray[np.bool_]) -> None:
        """These networks [R] know nothing of the noise again."""


def mean_of(values: Array, shares: Array) -> Array:
    """[1, n, ...]: the mean of values [R, n, ...] with these shares [R]."""
    return total(shares[:, None, None] * values, 0)[None]


def disagreeing(predicted: Array, shares: Array, count: int) -> Array:
    """The mean of predictions of `count` parts, of which the first is a mean and the last a variance. It grows where
    the experts disagree.
    """
    mean = mean_of(predicted, shares)
    apart = parts(predicted, count)[0] - parts(mean, count)[0]
    parts(mean, count)[-1][...] += mean_of(apart**2, shares)
    return mean


class Classes(Observing):
    """One of K + 1 classes: softmax(0, f). Predictions are probabilities [R, n, K + 1]; y [n] are places of classes."""

    def predict(self, f: Array, w: Array) -> Array:
        if f.shape[2] == 1:  # the same in fewer steps
            odds = f / np.sqrt(1 + PROBIT * np.maximum(w[..., 0], 0))
            return sigmoid(np.concatenate([-odds, odds], 2))
        r, n, k = f.shape
        padded, wide = np.zeros((r, n, k + 1)), np.zeros((r, n, k + 1, k + 1))
        padded[..., 1:], wide[..., 1:, 1:] = f, w
        return flattened(padded, wide)

    def log_likelihood(self, predicted: Array, y: Targets) -> Array:
        return log_of(predicted, y)

    def derivatives(self, predicted: Array, y: Targets) -> tuple[Array, Array]:
        """B B' = diag(p) - p p' for all classes but the first: B = diag(s) - p s' / (1 + sqrt(p_0)), s = sqrt(p)."""
        if predicted.shape[2] == 2:
            p = within(predicted[..., 1:], MIN_CLASS_PROBABILITY, 1 - MIN_CLASS_PROBABILITY)
            return y[:, None] - p, np.sqrt(p * (1 - p))[..., None]
        p = np.maximum(predicted, MIN_CLASS_PROBABILITY)
        p = p / total(p)[..., None]
        s = np.sqrt(p)
        first, p, s = s[..., :1], p[..., 1:], s[..., 1:]
        b = -p[..., None] * (s / (1 + first))[..., None, :]
        diagonals(b)[...] += s
        return (y[:, None] == np.arange(1, predicted.shape[2])) - p, b

    def softer(self, predicted: Array, y: Targets) -> Array:
        log_p = log(predicted[0], 1e-12)
        sums = total(np.exp(SOFTENED_POWERS * log_p))  # [s, n]
        log_ratio: Array = (SOFTENED_POWERS[:, 0] - 1) * log_p[np.arange(len(y)), y] - np.log(sums)
        return log_ratio

    def surprise(self, predicted: Array, y: Targets) -> Array:
        p = predicted[0]
        surprise: Array = total(p * log(p)) - log_of(predicted, y)[0]
        return surprise


def flattened(f: Array, w: Array) -> Array:
    """[..., C]: the softmax of outputs N(f, w), f [..., C] and w [..., C, C], about averaged over them: MacKay's
    formula for each pair of classes.
    """
    v = diagonals(w)
    apart = v[..., None] + v[..., None, :]
    apart -= 2 * w
    odds = f[..., None, :] - f[..., None]  # of class j against i, in logs
    odds /= np.sqrt(1 + PROBIT * np.maximum(apart, 0))
    p = 1 / total(np.exp(odds))
    return p / total(p)[..., None]


def log_of(p: Array, y: Targets) -> Array:
    """[R, n]: the log of the probability of y [n] in p [R, n, C]."""
    return log(p[:, np.arange(len(y)), y])


class Labels(Observing):
    """K yes-or-no labels, y [n, K] of 0 and 1. Predictions are the probabilities of 1 [R, n, K]."""

    def predict(self, f: Array, w: Array) -> Array:
        return sigmoid(f / np.sqrt(1 + PROBIT * np.maximum(diagonals(w), 0)))

    def log_likelihood(self, predicted: Array, y: Targets) -> Array:
        return total(log(np.where(y > 0.5, predicted, 1 - predicted)))

    def derivatives(self, predicted: Array, y: Targets) -> tuple[Array, Array]:
        p = within(predicted, MIN_CLASS_PROBABILITY, 1 - MIN_CLASS_PROBABILITY)
        return y - p, diagonal_matrices(np.sqrt(p * (1 - p)))

    def softer(self, predicted: Array, y: Targets) -> Array:
        p = within(predicted[0], 1e-12, 1 - 1e-12)
        odds = np.log(p / (1 - p))
        right = np.where(y > 0.5, odds, -odds)
        return total(log_sigmoid(SOFTENED_POWERS * right) - log_sigmoid(right))

    def surprise(self, predicted: Array, y: Targets) -> Array:
        p = predicted[0]
        surprise: Array = total(p * log(p) + (1 - p) * log(1 - p)) - self.log_likelihood(predicted, y)[0]
        return surprise


class Numbers(Observing):
    """K numbers with Gaussian noise, y [n, K]. Predictions [R, n, 3 K] are the mean and the variances of noise and of
    the outputs.

    The noise has an inverse gamma as its prior, as in targets/numbers.py, after `count` rows with the mean squared
    error v: v <- (count v + sum E (y - f)^2) / (count + n), where E averages over the outputs after the rows.
    """

    names = ("noise", "count")

    def __init__(self, replicas: int, targets: int, noise: float | None) -> None:
        self.known = noise
        self.noise = np.full((replicas, targets), 1.0 if noise is None else noise**2)
        self.count = np.full(replicas, FIRST_ROWS)

    def predict(self, f: Array, w: Array) -> Array:
        return np.concatenate([f, self.noise[:, None] + 0 * f, np.maximum(diagonals(w), 0)], 2)

    def log_likelihood(self, predicted: Array, y: Targets) -> Array:
        f, noise, w = parts(predicted, 3)
        v = noise + w
        return -0.5 * total((y - f) ** 2 / v + np.log(v) + math.log(2 * math.pi))

    def derivatives(self, predicted: Array, y: Targets) -> tuple[Array, Array]:
        f, noise, _ = parts(predicted, 3)
        return (y - f) / noise, diagonal_matrices(1 / np.sqrt(noise))

    def softer(self, predicted: Array, y: Targets) -> Array:
        f, noise, w = parts(predicted[0], 3)
        square = np.minimum((y - f) ** 2 / (noise + w), MAX_SQUARED_ERROR)  # one outlier is no change
        return 0.5 * total((1 - SOFTENED_POWERS) * square + np.log(SOFTENED_POWERS))

    def surprise(self, predicted: Array, y: Targets) -> Array:
        f, noise, w = parts(predicted[0], 3)
        return 0.5 * total((y - f) ** 2 / (noise + w) - 1)

    def mixed(self, predicted: Array, shares: Array) -> Array:
        return disagreeing(predicted, shares, 3)

    def learn(self, f: Array, variance: Array, a: Array, b: Array, root: Array, y: Targets, kept: Array) -> None:
        if self.known is not None:
            return
        after = f + (variance @ a.reshape(len(a), -1, 1)).reshape(f.shape)
        less = product(root, rooted(b, variance))
        left = diagonals(variance) - total(less * less, 1)
        error = total((y - after) ** 2 + left.reshape(f.shape), 1)
        rows = self.count + len(y)
        self.noise = np.maximum((self.count[:, None] * self.noise + error) / rows[:, None], 1e-12)
        self.count = np.maximum(kept ** len(y) * rows, FIRST_ROWS)

    def follow(self, scaling: Scaling, standardized: bool) -> None:
        """A known noise is in the units of the scaled targets."""
        if self.known is not None and standardized:
            self.noise[:] = (self.known / scaling.std) ** 2

    def copy(self, target: int, source: int) -> None:
        self.noise[target], self.count[target] = self.noise[source], self.count[source]

    def reset(self, targets: NDArray[np.bool_]) -> None:
        if self.known is None:
            self.noise[targets], self.count[targets] = 1.0, FIRST_ROWS


FIRST_ROWS = 4.0  # rows that the first value of the noise counts for


class Counts(Observing):
    """K counts, y [n, K]: Poisson with the rate exp(f + offset). Predictions [R, n, 2 K] are the mean and the variance:
    with uncertain outputs, the rate is log-normal, and the count about negative binomial.
    """

    names = ("offset",)

    def __init__(self, targets: int) -> None:
        self.offset = np.zeros(targets)  # the log of the mean of earlier counts

    def predict(self, f: Array, w: Array) -> Array:
        v = within(diagonals(w), 0, MAX_LOG_RATE)
        rate = np.exp(np.minimum(f + self.offset + 0.5 * v, MAX_LOG_RATE))
        return np.concatenate([rate, rate + rate**2 * np.expm1(v)], 2)

    def log_likelihood(self, predicted: Array, y: Targets) -> Array:
        return total(_negative_binomial(y, *parts(predicted, 2)))

    def derivatives(self, predicted: Array, y: Targets) -> tuple[Array, Array]:
        """At the predicted rate. A count far above it would move the log rate by e / rate, and the rate beyond all
        bounds: its curvature is such that it moves the log rate to log(y) at most.
        """
        rate = parts(predicted, 2)[0]
        e = y - rate
        far = e > SURPRISING_DEVIATIONS * np.sqrt(y)
        curvature = np.where(far, e / np.log(np.where(far, y / rate, math.e)), rate)
        return e, diagonal_matrices(np.sqrt(curvature))

    def softer(self, predicted: Array, y: Targets) -> Array:
        rate, variance = parts(predicted[0], 2)
        log_ratio = _negative_binomial(y, rate, variance / SOFTENED_POWERS) - _negative_binomial(y, rate, variance)
        most = 0.5 * ((1 - SOFTENED_POWERS) * MAX_SQUARED_ERROR + np.log(SOFTENED_POWERS))  # as for numbers
        return total(np.minimum(log_ratio, most))

    def surprise(self, predicted: Array, y: Targets) -> Array:
        """As if the counts were Gaussian: their entropy has no closed form."""
        rate, variance = parts(predicted[0], 2)
        return 0.5 * total((y - rate) ** 2 / variance - 1)

    def mixed(self, predicted: Array, shares: Array) -> Array:
        return disagreeing(predicted, shares, 2)

    def follow(self, scaling: Scaling, standardized: bool) -> None:
        """Counts are relative to their mean so far."""
        self.offset = np.log(np.maximum(scaling.mean, 0.01))


def _negative_binomial(y: Targets, mean: Array, variance: Array) -> Array:
    """The log of its probability, elementwise; nearly a Poisson where the variance is hardly above the mean."""
    size = mean**2 / np.maximum(variance - mean, 1e-6 * mean)
    more = _lgamma(y + size) - _lgamma(size) - _lgamma(y + 1)
    log_p: Array = more - size * np.log1p(mean / size) + y * (np.log(mean) - np.log(mean + size))
    return log_p


def _lgamma(a: Array) -> Array:
    """log Gamma(a), which numpy does not have."""
    values: Array = torch.from_numpy(a).lgamma().numpy()
    return values


def parts(predicted: Array, count: int) -> list[Array]:
    """A prediction [..., count K] as this many parts [..., K]."""
    k = predicted.shape[-1] // count
    return [predicted[..., i * k : (i + 1) * k] for i in range(count)]
