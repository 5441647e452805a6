"""Measures of agents, as pure functions of the matrix of returns.

`a[t][k]` is the mean return on task k after learning task t. `ceiling[k]` is that of an agent which learned task k
alone, with as many environment steps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evcl import metrics


def average_return(returns: ArrayLike) -> float:
    """The mean return over all tasks, after the last one is learned."""
    return metrics.average_accuracy(returns)


def normalised_return(returns: ArrayLike, ceiling: ArrayLike) -> float:
    """1 + the mean over the tasks of `(a[T][k] - ceiling[k]) / |ceiling[k]|`: 1 is as good as one agent per task, less
    is worse. For returns above 0, this is the mean of `a[T][k] / ceiling[k]`. NaN if a ceiling is 0.
    """
    return 1 + _gain(np.asarray(returns, np.float64)[-1], np.asarray(ceiling, np.float64))


def forgetting(returns: ArrayLike) -> float:
    """How far the return on the tasks before the last has dropped from its best; see `evcl.metrics.forgetting`."""
    return metrics.forgetting(returns)


def forward_transfer(returns: ArrayLike, ceiling: ArrayLike) -> float:
    """How much better a task is learned for the tasks before it: `mean_{k>0} (a[k][k] - ceiling[k]) / |ceiling[k]|`.

    Below 0, the method learns less of a new task than an agent that learns it alone. NaN for a single task.
    """
    diagonal, best = np.diag(np.asarray(returns, np.float64))[1:], np.asarray(ceiling, np.float64)[1:]
    return _gain(diagonal, best) if len(diagonal) else float("nan")


def _gain(returns: NDArray[np.float64], best: NDArray[np.float64]) -> float:
    return float(np.mean((returns - best) / np.where(best == 0, np.nan, np.abs(best))))
