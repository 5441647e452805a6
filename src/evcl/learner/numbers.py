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
from evcl.learner.reading import INFER, in_form
from evcl.targets import Bernoulli, Poisson
from evcl.targets.answers import Measures, NumberMeasures, Numbers, Predictions
from evcl.targets.negative_binomial import count_interval, count_nll
from evcl.targets.scale import Scale

if TYPE_CHECKING:
    from evcl.learner.predictor import Predictor

TESTED = 2000  # at most this many rows of a task are predicted before they are learned


class Moments(NamedTuple):
    """Mean and variances [N, D] of predictions, in float64, in the units of the targets."""

    mean: Tensor
    noise: Tensor
    epistemic: Tensor

    @property
    def variance(self) -> Tensor:
        return self.noise + self.epistemic

    @property
    def doubt(self) -> Tensor:
        """[N], from 0 to 1: the share of the variance that is due to uncertain weights."""
        return (self.epistemic / self.variance.clamp_min(1e-300)).mean(1)


def moments(predictor: Predictor, averaged: Tensor, scale: Scale) -> Moments:
    """Mean and variances from what the likelihood predicts [N, ...], averaged over draws. `scale` is the head's."""
    run = predictor._run
    draws = int(run.settings.get("predict_samples", 1)) if run.network.posterior.log_std is not None else 1
    unbiased = draws / max(1, draws - 1)  # the mean over the draws is as near to them as any number can be
    averaged = averaged.double()
    if isinstance(run.likelihood, Poisson):  # errors are multiples of the rate
        rate, square = averaged.chunk(2, 1)
        spread = scale.noise(torch.ones_like(rate)).clamp_min(1.0)
        return Moments(rate, spread * rate, unbiased * (square - rate.square()).clamp_min(0))
    mean, square, noise = averaged.chunk(3, 1)
    units = scale.std.to(averaged.device).square()
    epistemic = units * unbiased * (square - mean.square()).clamp_min(0)
    return Moments(scale.restored(mean), scale.noise(units * noise), epistemic)


def predicted(predictor: Predictor, x: Tensor, task: str | int | None) -> Tensor:
    """[N, ...]: what the likelihood predicts, averaged over draws (see `Likelihood.predict`)."""
    predictor._check_idle()
    if task == INFER:
        raise EvclError("the task can be inferred from class probabilities only: choose a task")
    head, number = predictor._session.groups[predictor._head(task)][0].number, predictor._number(task)
    (found,) = predictor._tried(x, lambda x: [predictor._run.predict(x, head, task=number)])
    return found


def moments_of(predictor: Predictor, x: Tensor, task: str | int | None) -> Moments:
    """Mean and variances of predictions for x [N, ...]."""
    return moments(predictor, predicted(predictor, x, task), predictor._session.scales[predictor._head(task)])


def widened(predictor: Predictor, x: Tensor, task: str | int | None) -> Moments:
    """`moments_of`, with more epistemic variance for rows that have values outside the range of the training rows.

    Data say nothing about the function there. Let x' be the nearest row within the range, e the distance between both
    (see `Density.within`), f the mean that the network predicts, and s the deviation of the targets; of counts, their
    mean. The function may change as the network does beyond the edge of the data, or not at all, or by s per deviation
    of the inputs as it does within the data on average. So the variance grows by (f(x) - f(x'))^2 + (e s)^2.
    """
    found, seen = moments_of(predictor, x, task), predictor._session.density
    if seen is None or len(seen.mean) != x[0].numel():
        return found
    moved, far = seen.within(x)
    rows = far.nonzero().flatten()
    if not len(rows):
        return found
    head = predictor._head(task)
    spread = predictor._session.scales[head].std
    if isinstance(predictor._run.likelihood, Poisson):
        spread = predictor._run.network.number_head(predictor._session.groups[head][0].number).beside[0].double().exp()
    change = found.mean[rows] - moments_of(predictor, moved[rows], task).mean
    more = change.square() + (far[rows].to(change).unsqueeze(1) * spread.to(change)).square()
    return found._replace(epistemic=found.epistemic.index_add(0, rows, more))


def predictions(predictor: Predictor, x: Any, task: str | int | None) -> Predictions | Numbers:
    """`Learner.predictions` for targets other than classes."""
    checked, likelihood = predictor._inputs(x), predictor._run.likelihood
    first = {head: name for name, head in reversed(predictor._tasks.items())}
    tasks = np.full(len(checked), first[predictor._head(None if task == INFER else task)])
    parts: list[Tensor]
    if isinstance(likelihood, Bernoulli):
        p, within = predicted(predictor, checked, task).chunk(2, 1)
        entropy = torch.special.entr(p) + torch.special.entr(1 - p)
        aleatoric = torch.minimum(within, entropy)
        parts, doubt = [(p > 0.5).long(), p, entropy, aleatoric, entropy - aleatoric], entropy.mean(1) / math.log(2)
    else:
        found = widened(predictor, checked, task)
        parts = [found.mean, *(one.sqrt() for one in (found.variance, found.noise, found.epistemic))]
        doubt = found.doubt
    shaped: Any = [in_form(x, one[:, 0] if one.shape[1] == 1 else one) for one in parts]
    seen, unfamiliar = predictor._session.density, None
    if seen is not None and len(seen.mean) == checked[0].numel():
        unfamiliar = in_form(x, seen.unfamiliar(checked, doubt.to(checked)))
    if isinstance(likelihood, Bernoulli):
        return Predictions._make([*shaped, tasks, unfamiliar])
    return Numbers._make([*shaped, tasks, unfamiliar, isinstance(likelihood, Poisson)])


def measures(predictor: Predictor, x: Tensor, y: Tensor, task: str | int | None) -> Measures | NumberMeasures:
    """`Learner.measure` for targets other than classes, y [N, D]."""
    if y.shape[1] != (wanted := len(predictor._heads[predictor._head(task)])):
        raise EvclError(f"its head has {wanted} targets per example, but these have {y.shape[1]}")
    if isinstance(predictor._run.likelihood, Bernoulli):
        return Measures(*label_measures(predicted(predictor, x, task), y))
    return measured(widened(predictor, x, task), y, isinstance(predictor._run.likelihood, Poisson))


def of_kept(predictor: Predictor, least: int) -> dict[str, float]:
    """The first measure on the rows that are kept of each task, if there are at least `least`."""
    found = {}
    for kept in predictor._run.kept_examples():
        if kept.y.shape[1] < max(1, least):
            continue
        name = predictor.tasks[kept.task]
        y = predictor._session.scales[predictor._tasks[name]].restored(kept.y[0].double())
        found[name] = measures(predictor, kept.x[0], y, name)[0]
    return found


def new_errors(predictor: Predictor, x: Tensor, y: Tensor, weights: Tensor | None, head: str) -> Tensor:
    """[n, D]: the squared errors, without the part that uncertain weights explain, on rows that were not learned from,
    x and y [N, D], or on some of them; of counts, as multiples of the rate. They are multiplied by `weights` [N].
    """
    step = math.ceil(len(y) / TESTED)
    some, wanted = x[::step], y[::step]
    task = next(name for name, own in predictor._tasks.items() if own == head)
    found = moments_of(predictor, some, task)
    errors = (wanted.to(some.device) - found.mean).square() - found.epistemic
    if isinstance(predictor._run.likelihood, Poisson):
        errors = errors / found.mean.clamp_min(1e-6)
    return errors if weights is None else weights[::step].to(errors).unsqueeze(1) * errors


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


def label_measures(averaged: Tensor, y: Tensor) -> tuple[float, float, float]:
    """Accuracy over all labels, mean NLL of an example and expected calibration error, for y [N, D] of 0 and 1."""
    p, true = averaged.double().chunk(2, 1)[0].cpu().numpy(), y.cpu().numpy()
    both, right = np.stack([1 - p.ravel(), p.ravel()], 1), true.ravel().astype(int)
    accuracy = float(((p > 0.5) == (true > 0.5)).mean())
    nll = metrics.nll(both, right) * p.shape[1]
    return accuracy, nll, metrics.expected_calibration_error(both, right)
