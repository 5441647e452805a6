"""Counts: p(y | outputs) = prod_d Poisson(y_d; rate_d), rate = exp(f + o), o the log of the first task's mean count.

With o, a network whose outputs are near 0 predicts the usual count, whether that is 0.1 or 10,000.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from evcl._core.devices import double
from evcl.nn import BayesianNetwork
from evcl.targets.answers import Array, NumberMeasures, Numbers
from evcl.targets.likelihood import OF_NUMBERS, Estimate, drawn, known, own_columns, weighted
from evcl.targets.negative_binomial import count_interval, count_nll
from evcl.targets.scale import Scale
from evcl.targets.values import Moments, Values, unbiased

MAX_LOG_RATE = 30.0  # the largest log rate: more would overflow where a network is far from its data


class CountMoments(Moments):
    """Mean and variances of predicted counts."""

    def errors(self, y: Tensor) -> Tensor:
        """As multiples of the rate."""
        return super().errors(y) / self.mean.clamp_min(1e-6)

    def answer(self, fields: list[Array]) -> Numbers:
        return Numbers(*fields)._replace(counts=True)

    def measure(self, y: Tensor) -> NumberMeasures:
        y = y.to(self.mean)
        rmse = float((y - self.mean).square().mean().sqrt())
        mean, std, true = (t.cpu().numpy() for t in (self.mean, self.variance.clamp_min(1e-300).sqrt(), y))
        low, high = count_interval(mean, std, 0.95)
        inside = (true >= low) & (true <= high)
        return NumberMeasures(rmse, float(count_nll(mean, std, true).sum(1).mean()), float(inside.mean()))


class Poisson(Values):
    """Counts, y [..., D]: `p(y | outputs) = Poisson(y; exp(f + o))`. Outputs [..., 2 D] are f and constants o."""

    name, beside, usual_tempering = "poisson", True, OF_NUMBERS
    wanted = "whole numbers of at least 0"

    def wrong(self, y: Tensor) -> Tensor:
        return (y < 0) | (y != y.round())

    def nll(self, outputs: Tensor, y: Tensor, columns: Tensor | None) -> Tensor:
        z = _log_rate(own_columns(outputs, columns))
        return (z.exp() - y * z + torch.lgamma(y + 1)).sum(-1)

    def place(self, network: BayesianNetwork, k: int, before: Scale, y: Tensor, w: Tensor) -> Scale:
        if not before.rows:
            usual = (w * y).sum(0).div(w.sum()).clamp_min(1 / (1 + len(y))).log()
            head = network.number_head(k)
            head.beside = usual.to(head.beside).expand_as(head.beside).clone()
        return before

    @torch.no_grad()
    def rescale_head(self, head: nn.Linear, network: BayesianNetwork, k: int, scale: Scale) -> None:
        super().rescale_head(head, network, k, scale)
        head.bias.add_(network.number_head(k).beside[0])

    def predict(self, outputs: Tensor) -> Tensor:
        """[M, 2 D]: the rate and its square. Averaged over draws of the weights, they give mean and variance."""
        rate = double(_log_rate(outputs)).exp()
        return torch.cat([rate, rate.square()], -1)

    def outcome(self, averaged: Tensor, scale: Scale, draws: int) -> CountMoments:
        """Errors are multiples of the rate."""
        rate, square = averaged.double().chunk(2, 1)
        spread = scale.noise(torch.ones_like(rate)).clamp_min(1.0)
        return CountMoments(rate, spread * rate, unbiased(draws) * (square - rate.square()).clamp_min(0))

    def spread(self, network: BayesianNetwork, k: int, scale: Scale) -> Tensor:
        """Their mean."""
        return network.number_head(k).beside[0].double().exp()

    def score(self, predicted: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The NLL at the mean rate, and whether the rounded rate is the count."""
        rate = predicted.chunk(2, -1)[0].to(y).clamp_min(torch.finfo(y.dtype).tiny)
        nll = (rate - y * rate.log() + torch.lgamma(y + 1)).sum(-1)
        return nll, (rate.round() == y).to(y).mean(-1)

    def surprise(self, outputs: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
        rate = _log_rate(outputs).exp()
        return weighted((y - rate).square(), weights) / weighted(rate, weights).clamp_min(1e-12)

    def known(self, predicted: Tensor, draws: int, weights: Tensor | None) -> Tensor:
        rate, square = predicted.chunk(2, -1)
        return known(rate, draws / (draws - 1) * (square - rate.square()), weights)

    def fisher_targets(self, outputs: Tensor, y: Tensor, weights: Tensor, how: Estimate) -> list[Tensor]:
        """d log p / d z = y - exp(z), whose mean square is exp(z). Temperature has no meaning here."""
        z = _log_rate(outputs)
        rate, root = z.detach().exp(), weights.unsqueeze(-1).sqrt()
        if how.kind == "exact":
            return [(root[..., 0] * rate[..., d].sqrt() * z[..., d]).sum() for d in range(z.shape[-1])]
        if how.kind == "sampled":
            y = drawn(lambda one, source: torch.poisson(one, generator=source), rate, how.generators)
        return [(root * (y - rate) * z).sum()]

    def skip_labels(self, outputs: Tensor, generators: Sequence[torch.Generator] | None) -> None:
        """A Poisson draw uses a number of draws that depends on its rate, so there is no telling."""
        raise ValueError("a sampled Fisher of counts cannot be shared by processes: use fisher='exact'")


def _log_rate(outputs: Tensor) -> Tensor:
    f, o = outputs.chunk(2, -1)
    return (f + o).clamp(max=MAX_LOG_RATE)
