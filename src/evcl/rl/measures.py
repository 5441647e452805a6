"""Measures of agents, as pure functions of the matrix of returns.

`a[t][k]` is the mean return on task k after learning task t. `ceiling[k]` is that of an agent which learned task k
alone, with as many environment steps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from evcl import metrics


def average_return(returns: ArrayLike) -> float:
    """The mean return over all tasks, after the last one is learned."""
    return metrics.average_accuracy(returns)


def normalised_return(returns: ArrayLike, ceiling: ArrayLike) -> float:
    """The mean over the tasks of `a[T][k] / ceiling[k]`: 1 is as good as one agent per task."""
    last, best = np.asarray(returns, np.float64)[-1], np.asarray(ceiling, np.float64)
    return float(np.mean(last / np.where(best == 0, np.nan, best)))


def forgetting(returns: ArrayLike) -> float:
    """How far the return on the tasks before the last has dropped from its best; see `evcl.metrics.forgetting`."""
    return metrics.forgetting(returns)


def forward_transfer(returns: ArrayLike, ceiling: ArrayLike) -> float:
    """How much better a task is learned for the tasks before it: `mean_{k>0} (a[k][k] / ceiling[k] - 1)`.

    Below 0, the method learns less of a new task than an agent that learns it alone. NaN for a single task.
    """
    diagonal, best = np.diag(np.asarray(returns, np.float64))[1:], np.asarray(ceiling, np.float64)[1:]
    return float(np.mean(diagonal / best - 1)) if len(diagonal) else float("nan")
