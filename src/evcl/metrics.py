"""Metrics, as pure functions of the accuracy matrix, or of probabilities and labels.

In the accuracy matrix, `a[t][k]` is the accuracy on task k after learning task t. Only k <= t is used, and rows that
were not measured are NaN.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "accuracy_curve",
    "average_accuracy",
    "backward_transfer",
    "expected_calibration_error",
    "forgetting",
    "learning_accuracy",
    "nll",
    "reliability",
]

Floats = NDArray[np.float64]


def _matrix(accuracy: ArrayLike) -> Floats:
    a = np.asarray(accuracy, dtype=np.float64)
    if a.ndim != 2 or a.shape[0] != a.shape[1] or a.shape[0] == 0:
        raise ValueError(f"an accuracy matrix must be square, with one row per task, not of shape {a.shape}")
    return a


def accuracy_curve(accuracy: ArrayLike) -> Floats:
    """The mean accuracy over the tasks seen so far, after each task: `mean_{k<=t} a[t][k]`."""
    a = _matrix(accuracy)
    return np.array([a[t, : t + 1].mean() for t in range(len(a))])


def average_accuracy(accuracy: ArrayLike) -> float:
    """The mean accuracy over all tasks, after the last one is learned."""
    return float(_matrix(accuracy)[-1].mean())


def forgetting(accuracy: ArrayLike) -> float:
    """How far the accuracy on the tasks before the last has dropped from its best (Chaudhry et al., 2018).

    `mean_{k<T} ( max_{k<=t<T} a[t][k] - a[T][k] )`; NaN for a single task.
    """
    a = _matrix(accuracy)
    last = len(a) - 1
    if last == 0:
        return float("nan")
    return float(np.mean([a[k:last, k].max() - a[last, k] for k in range(last)]))


def backward_transfer(accuracy: ArrayLike) -> float:
    """The effect of later tasks on earlier ones (Lopez-Paz and Ranzato, 2017): `mean_{k<T} ( a[T][k] - a[k][k] )`."""
    a = _matrix(accuracy)
    last = len(a) - 1
    if last == 0:
        return float("nan")
    return float(np.mean(a[last, :last] - np.diag(a)[:last]))


def learning_accuracy(accuracy: ArrayLike) -> float:
    """The mean accuracy on each task just after it is learned (Riemer et al., 2019): `mean_k a[k][k]`. It is low for a
    method that protects earlier tasks so much that it learns too little of new ones.
    """
    return float(np.diag(_matrix(accuracy)).mean())


def _probabilities(probabilities: ArrayLike, labels: ArrayLike) -> tuple[Floats, NDArray[np.int64]]:
    p, y = np.asarray(probabilities, dtype=np.float64), np.asarray(labels, dtype=np.int64)
    if p.ndim != 2 or y.shape != p.shape[:1] or len(y) == 0:
        raise ValueError(f"expected probabilities [N, classes] and labels [N], not {p.shape} and {y.shape}")
    return p, y


def nll(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """The mean negative log-likelihood, in nats. A probability of 0 counts as the smallest normal float32."""
    p, y = _probabilities(probabilities, labels)
    tiny = float(np.finfo(np.float32).tiny)
    return float(-np.log(np.maximum(p[np.arange(len(y)), y], tiny)).mean())


def expected_calibration_error(probabilities: ArrayLike, labels: ArrayLike, bins: int = 15) -> float:
    """`sum_b n_b/n |accuracy_b - confidence_b|` over equal-width bins of the largest probability (Guo et al., 2017)."""
    bin_of, confidence, correct = _binned(probabilities, labels, bins)
    gaps = np.bincount(bin_of, weights=correct - confidence, minlength=bins)
    return float(np.abs(gaps).sum() / len(bin_of))


def reliability(probabilities: ArrayLike, labels: ArrayLike, bins: int = 15) -> Floats:
    """`[bins, 3]`: the number of examples in each bin of the largest probability, the sum of these probabilities, and
    how many predictions are right. Sums of several sets of examples can be added.
    """
    bin_of, *sums = _binned(probabilities, labels, bins)
    return np.stack([np.bincount(bin_of, weights, bins) for weights in (np.ones(len(bin_of)), *sums)], 1)


def _binned(probabilities: ArrayLike, labels: ArrayLike, bins: int) -> tuple[NDArray[np.int64], Floats, Floats]:
    """For each example: the bin of its largest probability, that probability, and 1 if the prediction is right."""
    p, y = _probabilities(probabilities, labels)
    confidence = p.max(1)
    bin_of = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    return bin_of, confidence, (p.argmax(1) == y).astype(np.float64)
