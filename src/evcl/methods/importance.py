"""The Fisher information of a task, the importance of its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from evcl import curvature
from evcl._core.randomness import GeneratorNoise, HostNoise, Noise, Purpose
from evcl._core.settings import Settings
from evcl.methods.data import TaskData
from evcl.methods.method import Fitted, Round
from evcl.methods.terms import Number
from evcl.nn import Gaussian, Layout

T = TypeVar("T")


def fisher(fitted: Fitted, round_: Round, s: Settings) -> Tensor:
    """[R, P]: the diagonal Fisher of the round's tasks over all weights; 0 for weights that the fit did not use."""
    total: Tensor | float = 0.0
    for i, task in enumerate(round_.tasks):
        own = torch.stack(estimates(curvature.fisher, fitted, task, round_.generators(Purpose.FISHER, i), round_, s))
        total = total + own.mean(0) * scale(own.mean(0).sum(1, keepdim=True), fitted, task, s)
    return widened(torch.as_tensor(total), fitted)


def scale(total: Tensor, fitted: Fitted, task: TaskData, s: Settings) -> Number:
    """What `fisher_scale` multiplies a task's Fisher by; `total` [R, 1] is its sum over the fit's weights."""
    if s.fisher_scale == "examples":  # to second order, the NLL of the task's rows
        return task.n
    if s.fisher_scale == "task":
        return sum(prod(shape) for shape in fitted.layout.shapes.values()) / total.clamp_min(1e-30)
    return 1.0


def divisor(n: int, s: Settings) -> int:
    """What a penalty on a task of n rows is divided by: n, or 1."""
    return n if "examples" in (s.strength_scale, s.fisher_scale) else 1


def estimates(
    measure: Callable[..., T], end: Fitted, task: TaskData, sources: list[torch.Generator], round_: Round, s: Settings
) -> list[T]:
    """What `measure`, such as `curvature.fisher`, finds on `fisher_examples` examples of a task: at the point weights,
    at the posterior's means, or at each of several posterior draws.
    """
    sample = sampled(end, task, s.fisher_examples, sources, round_)
    options = (s.fisher, sources, s.fisher_temperature, s.fisher_spread, round_.likelihood)
    drawn = s.fisher_draws and end.own.log_std is not None
    points = drawn_points(end.own, end.layout, s.fisher_draws, sources) if drawn else [end.own.mean]
    return [measure(replace(sample, mean=point), *options) for point in points]


def drawn_points(q: Gaussian, layout: Layout, draws: int, generators: list[torch.Generator]) -> list[Tensor]:
    """Posterior draws [R, P]. No number is drawn for padding, so that every device draws the same weights."""
    plain, points = Layout(layout.shapes), []
    for _ in range(draws):
        z = torch.stack([torch.randn(plain.size, generator=g, dtype=q.mean.dtype) for g in generators])
        points.append(q.draw(plain.gather(z.to(q.mean.device), layout)))
    return points


def sampled(
    fitted: Fitted, task: TaskData, examples: int, generators: list[torch.Generator], round_: Round
) -> curvature.Sample:
    """Up to this many random examples of a task for each replica, at the means that a fit ended with."""
    rows = task.drawn(generators, examples)
    data, from_below = task.seen_by(fitted.network)
    about = (fitted.network, fitted.own.mean, fitted.layout, [task.head], *data.take(rows))
    noise: Noise | None = GeneratorNoise(generators) if round_.likelihood.draws else None  # of latent variables
    if noise is not None and rows.device.type != "cpu":
        noise = HostNoise(noise)
    weights = task.take_weights(rows)
    return curvature.Sample(*about, weights, task.task, round_.ranks, from_below=from_below, noise=noise)


def widened(own: Tensor, fitted: Fitted) -> Tensor:
    """[R, P] over all weights from numbers for the fit's weights; 0 for the others."""
    whole = torch.zeros_like(fitted.q.mean)
    fitted.network.layout.scatter_(whole, fitted.layout, own)
    return whole
