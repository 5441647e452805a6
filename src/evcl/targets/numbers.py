"""Regression: p(y | outputs) = prod_d N(y_d; f_d, v_d), with one noise variance v_d for each output of a head.

The noise has a conjugate prior, an inverse gamma. After n_0 rows with the noise v_0, it is IG(n_0 / 2, n_0 v_0 / 2).
The n rows of a new task make it IG((n_0 + n) / 2, (n_0 v_0 + sum_i E_q (y_i - f(x_i))^2) / 2), because q(weights) and
q(v) are independent. What the NLL needs is 1 / E_q[1 / v], the ratio of the two parameters:

    v = (n_0 v_0 + sum_i E_q (y_i - f(x_i))^2) / (n_0 + n)

E_q (y - f)^2 includes the variance of f under the posterior, which makes up for the errors being smaller on rows that
were trained on. While a task is learned, v follows this value as the errors of the last batches give it. So the noise
is carried from task to task by Bayes' rule, and no row counts twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from evcl._core.devices import double
from evcl.nn import BayesianNetwork
from evcl.targets.likelihood import OF_NUMBERS, Estimate, drawn, known, normal, own_columns, weighted
from evcl.targets.scale import Scale
from evcl.targets.values import Moments, Values, unbiased

NORMAL_975 = 1.959964  # a prediction is right if y is within this many standard deviations: the 95% interval


class Gaussian(Values):
    """Numbers: `p(y | outputs) = N(y; f, v)` for each target. The outputs [..., 2 D] are f and, beside them, log v."""

    name, beside, constant_curvature, usual_tempering = "gaussian", True, True, OF_NUMBERS
    wanted = "numbers"

    def nll(self, outputs: Tensor, y: Tensor, columns: Tensor | None) -> Tensor:
        f, log_v = own_columns(outputs, columns).chunk(2, -1)
        return 0.5 * ((y - f).square() * (-log_v).exp() + log_v + math.log(2 * math.pi)).sum(-1)

    def place(self, network: BayesianNetwork, k: int, before: Scale, y: Tensor, w: Tensor) -> Scale:
        return before.merged(y, w)

    def expect(self, network: BayesianNetwork, k: int, errors: Tensor, scale: Scale) -> None:
        """Let the fit begin with a noise of at least that size. With the noise of earlier tasks, its first gradients
        would be so large that Adam's steps would be too small ever after.
        """
        head = network.number_head(k)
        size = (errors.mean(0).cpu() / scale.std.square()).clamp_min(1e-12).log()
        head.least = size.to(head.beside)

    def predict(self, outputs: Tensor) -> Tensor:
        """[M, 3 D]: f, f^2 and v. Averaged over draws of the weights, they give mean and variance."""
        f, log_v = double(outputs).chunk(2, -1)
        return torch.cat([f, f.square(), log_v.exp()], -1)

    def outcome(self, averaged: Tensor, scale: Scale, draws: int) -> Moments:
        mean, square, noise = averaged.double().chunk(3, 1)
        units = scale.std.to(averaged.device).square()
        epistemic = units * unbiased(draws) * (square - mean.square()).clamp_min(0)
        return Moments(scale.restored(mean), scale.noise(units * noise), epistemic)

    def spread(self, network: BayesianNetwork, k: int, scale: Scale) -> Tensor:
        return scale.std

    def score(self, predicted: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The NLL of a Gaussian with the mean and variance of the prediction, and whether y is in its 95% interval."""
        mean, square, noise = predicted.chunk(3, -1)
        variance = noise + (square - mean.square()).clamp_min(0)
        error = (y - mean).square()
        nll = 0.5 * (error / variance + variance.log() + math.log(2 * math.pi)).sum(-1)
        return nll.to(y), (error <= NORMAL_975**2 * variance).to(y).mean(-1)

    def surprise(self, outputs: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
        f, log_v = outputs.chunk(2, -1)
        return weighted((y - f).square() * (-log_v).exp(), weights)

    def known(self, predicted: Tensor, draws: int, weights: Tensor | None) -> Tensor:
        f, square, noise = predicted.chunk(3, -1)
        return known(noise, draws / (draws - 1) * (square - f.square()), weights)

    def fisher_targets(self, outputs: Tensor, y: Tensor, weights: Tensor, how: Estimate) -> list[Tensor]:
        """d log p / d f = (y - f) / v, whose mean square is 1 / v. Temperature has no meaning here."""
        f, log_v = outputs.chunk(2, -1)
        root, sharp = weights.unsqueeze(-1).sqrt(), (-0.5 * log_v).exp().detach()
        if how.kind == "exact":
            return [(root[..., 0] * sharp[..., d] * f[..., d]).sum() for d in range(f.shape[-1])]
        error = drawn(normal, f, how.generators) if how.kind == "sampled" else (y - f.detach()) * sharp
        return [(root * error * sharp * f).sum()]

    def skip_labels(self, outputs: Tensor, generators: Sequence[torch.Generator] | None) -> None:
        drawn(normal, outputs, generators)

    def squares(self, outputs: Tensor, y: Tensor, columns: Tensor | None) -> Tensor:
        return (y - own_columns(outputs, columns).chunk(2, -1)[0]).square()
