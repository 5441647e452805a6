"""Predictions of targets other than classes, with their uncertainty, and how good they are."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from evcl import metrics
from evcl._core.errors import EvclError
from evcl.learner.counts import count_interval, count_nll
from evcl.likelihoods import Poisson
from evcl.training.targets import Scale

if TYPE_CHECKING:
    from evcl.learner.predictor import Predictor

TESTED = 2000  # at most this many rows of a task are predicted before they are learned


class Numbers(NamedTuple):
    """Predictions of numbers or counts for N inputs, each [N], or [N, D] if there are several targets.

    Attributes:
        mean: the expected value
        std: the standard deviation around it of rows that come next: std^2 = aleatoric^2 + epistemic^2
        aleatoric: the part that more data of this kind would not reduce: noise. If targets drift from task to task, it
            includes how far the rows of the last tasks lay from what was predicted before they were learned
        epistemic: the part due to uncertain weights
        tasks: [N], the first task of the head that predicted
        unfamiliar: [N], how far the input lies from everything learned from, as in `Predictions`
    """

    mean: Any
    std: Any
    aleatoric: Any
    epistemic: Any
    tasks: Any
    unfamiliar: Any = None
    counts: bool = False

    def interval(self, level: float = 0.95) -> tuple[Any, Any]:
        """The lower and upper ends of intervals that contain the true value with this probability."""
        if not isinstance(level, (int, float)) or not 0 < level < 1:
            raise EvclError(f"the level of an interval must be between 0 and 1, such as 0.95, not {level!r}")
        if self.counts:
            return count_interval(self.mean, self.std, level)
        wide = NormalDist().inv_cdf(0.5 + level / 2) * self.std
        return self.mean - wide, self.mean + wide


class NumberMeasures(NamedTuple):
    """How good predictions of numbers are.

    Attributes:
        rmse: the root of the mean squared error, in the units of the targets
        nll: the mean negative log-likelihood, in nats, summed over the targets of an example
        coverage: the fraction of targets within their 95% interval
    """

    rmse: float
    nll: float
    coverage: float


class Moments(NamedTuple):
    """Mean and variances [N, D] of predictions, in float64, in the units of the targets."""

    mean: Tensor
    noise: Tensor
    epistemic: Tensor

    @property
    def variance(self) -> Tensor:
        return self.noise + self.epistemic


def moments(predictor: Predictor, predicted: Tensor, scale: Scale) -> Moments:
    """Mean and variances from what the likelihood predicts [N, ...], averaged over draws. `scale` is the head's."""
    run = predictor._run
    draws = int(run.settings.get("predict_samples", 1)) if run.network.posterior.log_std is not None else 1
    unbiased = draws / max(1, draws - 1)  # the mean over the draws is as near to them as any number can be
    predicted = predicted.double()
    if isinstance(run.likelihood, Poisson):  # errors are multiples of the rate
        rate, square = predicted.chunk(2, 1)
        spread = scale.noise(torch.ones_like(rate)).clamp_min(1.0)
        return Moments(rate, spread * rate, unbiased * (square - rate.square()).clamp_min(0))
    mean, square, noise = predicted.chunk(3, 1)
    units = scale.std.to(predicted.device).square()
    epistemic = units * unbiased * (square - mean.square()).clamp_min(0)
    return Moments(scale.restored(mean), scale.noise(units * noise), epistemic)


def new_errors(predictor: Predictor, x: Tensor, y: Tensor, head: str) -> Tensor:
    """[n, D]: the squared errors, without the part that uncertain weights explain, on rows that were not learned from,
    x and y [N, D], or on some of them; of counts, as multiples of the rate.
    """
    step = math.ceil(len(y) / TESTED)
    some, wanted = x[::step], y[::step]
    task = next(name for name, own in predictor._tasks.items() if own == head)
    found = predictor._moments(some, task)
    errors = (wanted.to(some.device) - found.mean).square() - found.epistemic
    return errors / found.mean.clamp_min(1e-6) if isinstance(predictor._run.likelihood, Poisson) else errors


def measured(found: Moments, y: Tensor, counts: bool) -> NumberMeasures:
    """How good these predictions are for y [N, D]."""
    y = y.to(found.mean)
    error, variance = (y - found.mean).square(), found.variance.clamp_min(1e-300)
    rmse = float(error.mean().sqrt())
    if counts:
        mean, std, true = (t.cpu().numpy() for t in (found.mean, variance.sqrt(), y))
        low, high = count_interval(mean, std, 0.95)
        inside = (true >= low) & (true <= high)
        return NumberMeasures(rmse, float(count_nll(mean, std, true).sum(1).mean()), float(inside.mean()))
    nll = 0.5 * (error / variance + variance.log() + math.log(2 * math.pi)).sum(1).mean()
    wide = NormalDist().inv_cdf(0.975)
    return NumberMeasures(rmse, float(nll), float((error <= wide**2 * variance).double().mean()))


def label_measures(predicted: Tensor, y: Tensor) -> tuple[float, float, float]:
    """Accuracy over all labels, mean NLL of an example and expected calibration error, for y [N, D] of 0 and 1."""
    p, true = predicted.double().chunk(2, 1)[0].cpu().numpy(), y.cpu().numpy()
    both, right = np.stack([1 - p.ravel(), p.ravel()], 1), true.ravel().astype(int)
    accuracy = float(((p > 0.5) == (true > 0.5)).mean())
    nll = metrics.nll(both, right) * p.shape[1]
    return accuracy, nll, metrics.expected_calibration_error(both, right)
