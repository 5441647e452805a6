"""What a filter needs of a likelihood: the prediction from Gaussian outputs, and how far an observation moves them.

The outputs of a row are N(f, W), because the weights are uncertain. Both the prediction and the derivatives of the
log-likelihood average over them, so that an uncertain network neither predicts nor learns as if it were sure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl.streams.filters import rooted

LEAST = 1e-4  # the probability below which a class gets no smaller curvature
PROBIT = math.pi / 8  # sigmoid(f) averaged over N(f, w) is about sigmoid(f / sqrt(1 + w pi / 8)) (MacKay, 1992)
MOST = 30.0  # the largest log rate
SOFTER = (0.25, 0.5, 0.75)  # softer predictions are proportional to p^(1 - s)
SQUARE = 9.0  # the largest squared error, in variances, that counts as evidence of a change


class Observing(Protocol):
    """One for each group of R networks. A prediction is a tensor [R, n, ...] whose last axis depends on the kind."""

    def predict(self, f: Tensor, w: Tensor) -> Tensor:
        """[R, n, ...]: the prediction for outputs f [R, n, K] with covariances w [R, n, K, K]."""
        ...

    def log_likelihood(self, predicted: Tensor, y: Tensor) -> Tensor:
        """[R, n]: the log of the predicted probability or density of y."""
        ...

    def derivatives(self, predicted: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """e [R, n, K] and B [R, n, K, K] (see filters.py)."""
        ...

    def softer(self, predicted: Tensor, y: Tensor) -> Tensor:
        """[s, n]: the log of q(y) / p(y) for predictions q less sure than p, one for each of `SOFTER`."""
        ...

    def surprise(self, predicted: Tensor, y: Tensor) -> Tensor:
        """[n]: -log p(y) less its mean under p."""
        ...

    def mixed(self, predicted: Tensor, shares: Tensor) -> Tensor:
        """[1, n, ...]: the prediction of experts [R, n, ...] with these shares [R]."""
        ...

    def learn(self, f: Tensor, variance: Tensor, a: Tensor, b: Tensor, factor: Tensor, y: Tensor, kept: Tensor) -> None:
        """Learn the noise, from the outputs before the rows, their V, and how the rows move them (see filters.py);
        `kept` [R] is the part of earlier rows to keep.
        """
        ...

    def state(self) -> dict[str, Tensor]: ...

    def restore(self, state: Mapping[str, Tensor]) -> None: ...


class _NoNoise:
    def mixed(self, predicted: Tensor, shares: Tensor) -> Tensor:
        return (shares.view(-1, 1, 1) * predicted).sum(0, keepdim=True)

    def learn(self, f: Tensor, variance: Tensor, a: Tensor, b: Tensor, factor: Tensor, y: Tensor, kept: Tensor) -> None:
        pass

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        pass


class Classes(_NoNoise):
    """One of K + 1 classes: softmax(0, f). Predictions are probabilities [R, n, K + 1]; y [n] are places of classes."""

    def predict(self, f: Tensor, w: Tensor) -> Tensor:
        if f.shape[2] == 1:  # the same in fewer steps
            odds = f / (1 + PROBIT * w.squeeze(3).clamp_min(0)).sqrt()
            return torch.cat([-odds, odds], 2).sigmoid()
        return flattened(F.pad(f, (1, 0)), F.pad(w, (1, 0, 1, 0)))

    def log_likelihood(self, predicted: Tensor, y: Tensor) -> Tensor:
        return log_of(predicted, y)

    def derivatives(self, predicted: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """B B' = diag(p) - p p' for all classes but the first: B = diag(s) - p s' / (1 + sqrt(p_0)), s = sqrt(p)."""
        if predicted.shape[2] == 2:
            p = predicted[..., 1:].clamp(LEAST, 1 - LEAST)
            return y.view(-1, 1) - p, (p * (1 - p)).sqrt().unsqueeze(3)
        p = predicted.clamp_min(LEAST)
        p = p / p.sum(-1, keepdim=True)
        first, p = p[..., :1], p[..., 1:]
        s = p.sqrt()
        b = torch.diag_embed(s) - p.unsqueeze(-1) * (s / (1 + first.sqrt())).unsqueeze(-2)
        return F.one_hot(y, p.shape[-1] + 1)[:, 1:] - p, b

    def softer(self, predicted: Tensor, y: Tensor) -> Tensor:
        log_p = predicted[0].clamp_min(1e-12).log()
        found = [((1 - s) * log_p).log_softmax(1) - log_p for s in SOFTER]
        return torch.stack([one.gather(1, y.unsqueeze(1)).squeeze(1) for one in found])

    def surprise(self, predicted: Tensor, y: Tensor) -> Tensor:
        expected: Tensor = torch.special.entr(predicted[0]).sum(1)
        return -log_of(predicted, y)[0] - expected


def flattened(f: Tensor, w: Tensor) -> Tensor:
    """[..., C]: the softmax of outputs N(f, w), f [..., C] and w [..., C, C], about averaged over them: MacKay's
    formula for each pair of classes.
    """
    v = w.diagonal(dim1=-2, dim2=-1)
    apart = (v.unsqueeze(-1) + v.unsqueeze(-2) - 2 * w).clamp_min(0)
    odds = (f.unsqueeze(-2) - f.unsqueeze(-1)) / (1 + PROBIT * apart).sqrt()  # of class j against i, in logs
    p = (-odds.logsumexp(-1)).exp()
    return p / p.sum(-1, keepdim=True)


def log_of(p: Tensor, y: Tensor) -> Tensor:
    """[R, n]: the log of the probability of y [n] in p [R, n, C]."""
    own = p.gather(2, y.view(1, -1, 1).expand(len(p), -1, -1)).squeeze(2)
    return own.clamp_min(torch.finfo(p.dtype).tiny).log()


class Labels(_NoNoise):
    """K yes-or-no labels, y [n, K] of 0 and 1. Predictions are the probabilities of 1 [R, n, K]."""

    def predict(self, f: Tensor, w: Tensor) -> Tensor:
        return (f / (1 + PROBIT * w.diagonal(dim1=2, dim2=3).clamp_min(0)).sqrt()).sigmoid()

    def log_likelihood(self, predicted: Tensor, y: Tensor) -> Tensor:
        own = torch.where(y > 0.5, predicted, 1 - predicted)
        return own.clamp_min(torch.finfo(own.dtype).tiny).log().sum(2)

    def derivatives(self, predicted: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        p = predicted.clamp(LEAST, 1 - LEAST)
        return y - p, torch.diag_embed((p * (1 - p)).sqrt())

    def softer(self, predicted: Tensor, y: Tensor) -> Tensor:
        odds = torch.logit(predicted[0], 1e-12)
        right = torch.where(y > 0.5, odds, -odds)
        found = [F.logsigmoid((1 - s) * right) - F.logsigmoid(right) for s in SOFTER]
        return torch.stack(found).sum(2)

    def surprise(self, predicted: Tensor, y: Tensor) -> Tensor:
        p = predicted[0]
        expected: Tensor = (torch.special.entr(p) + torch.special.entr(1 - p)).sum(1)
        return -self.log_likelihood(predicted, y)[0] - expected


class Numbers:
    """K numbers with Gaussian noise, y [n, K]. Predictions [R, n, 3 K] are the mean and the variances of noise and of
    the outputs.

    The noise has an inverse gamma as its prior, as in likelihoods/gaussian.py, after `count` rows with the mean squared
    error v: v <- (count v + sum E (y - f)^2) / (count + n), where E averages over the outputs after the rows.
    """

    def __init__(self, replicas: int, targets: int, noise: float | None) -> None:
        self.known = noise is not None
        self.noise = torch.full((replicas, targets), 1.0 if noise is None else noise**2, dtype=torch.float64)
        self.count = torch.full((replicas,), FIRST_ROWS, dtype=torch.float64)

    def predict(self, f: Tensor, w: Tensor) -> Tensor:
        return torch.cat([f, self.noise.unsqueeze(1).expand_as(f), w.diagonal(dim1=2, dim2=3).clamp_min(0)], 2)

    def log_likelihood(self, predicted: Tensor, y: Tensor) -> Tensor:
        f, noise, w = predicted.chunk(3, 2)
        v = noise + w
        return -0.5 * ((y - f).square() / v + v.log() + math.log(2 * math.pi)).sum(2)

    def derivatives(self, predicted: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        f, noise, _ = predicted.chunk(3, 2)
        return (y - f) / noise, torch.diag_embed(noise.rsqrt())

    def softer(self, predicted: Tensor, y: Tensor) -> Tensor:
        f, noise, w = predicted[0].chunk(3, 1)
        square = ((y - f).square() / (noise + w)).clamp_max(SQUARE)  # one outlier is no change
        return torch.stack([0.5 * (s * square + math.log(1 - s)).sum(1) for s in SOFTER])

    def surprise(self, predicted: Tensor, y: Tensor) -> Tensor:
        f, noise, w = predicted[0].chunk(3, 1)
        return 0.5 * ((y - f).square() / (noise + w) - 1).sum(1)

    def mixed(self, predicted: Tensor, shares: Tensor) -> Tensor:
        """The mean and variance of the mixture; where experts disagree, their outputs are uncertain."""
        f, noise, w = ((shares.view(-1, 1, 1) * one).sum(0, keepdim=True) for one in predicted.chunk(3, 2))
        apart = (shares.view(-1, 1, 1) * (predicted.chunk(3, 2)[0] - f).square()).sum(0, keepdim=True)
        return torch.cat([f, noise, w + apart], 2)

    def learn(self, f: Tensor, variance: Tensor, a: Tensor, b: Tensor, factor: Tensor, y: Tensor, kept: Tensor) -> None:
        if self.known:
            return
        after = f + (variance @ a.reshape(len(a), -1, 1)).view_as(f)
        less = torch.linalg.solve_triangular(factor, rooted(b, variance), upper=False)
        left = variance.diagonal(dim1=1, dim2=2) - less.square().sum(1)
        error = ((y - after).square() + left.view_as(f)).sum(1)
        total = self.count + y.shape[0]
        self.noise = ((self.count.unsqueeze(1) * self.noise + error) / total.unsqueeze(1)).clamp_min(1e-12)
        self.count = (kept * total).clamp_min(FIRST_ROWS)

    def state(self) -> dict[str, Tensor]:
        return {"noise": self.noise, "count": self.count}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.noise, self.count = state["noise"].clone(), state["count"].clone()


FIRST_ROWS = 4.0  # rows that the first value of the noise counts for


class Counts(_NoNoise):
    """K counts, y [n, K]: Poisson with the rate exp(f + offset). Predictions [R, n, 2 K] are the mean and the variance:
    with uncertain outputs, the rate is log-normal, and the count about negative binomial.
    """

    def __init__(self, targets: int) -> None:
        self.offset = torch.zeros(targets, dtype=torch.float64)  # the log of the mean of earlier counts

    def predict(self, f: Tensor, w: Tensor) -> Tensor:
        v = w.diagonal(dim1=2, dim2=3).clamp(0, MOST)
        rate = (f + self.offset + 0.5 * v).clamp_max(MOST).exp()
        return torch.cat([rate, rate + rate.square() * v.expm1()], 2)

    def log_likelihood(self, predicted: Tensor, y: Tensor) -> Tensor:
        return _negative_binomial(y, *predicted.chunk(2, 2)).sum(2)

    def derivatives(self, predicted: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        rate = predicted.chunk(2, 2)[0]
        return y - rate, torch.diag_embed(rate.sqrt())

    def softer(self, predicted: Tensor, y: Tensor) -> Tensor:
        rate, variance = predicted[0].chunk(2, 1)
        own = _negative_binomial(y, rate, variance)
        found = [_negative_binomial(y, rate, variance / (1 - s)) - own for s in SOFTER]
        most = [0.5 * (s * SQUARE + math.log(1 - s)) for s in SOFTER]  # as for numbers
        return torch.stack([one.clamp_max(high).sum(1) for one, high in zip(found, most, strict=True)])

    def surprise(self, predicted: Tensor, y: Tensor) -> Tensor:
        """As if the counts were Gaussian: their entropy has no closed form."""
        rate, variance = predicted[0].chunk(2, 1)
        return 0.5 * ((y - rate).square() / variance - 1).sum(1)

    def mixed(self, predicted: Tensor, shares: Tensor) -> Tensor:
        rate, variance = ((shares.view(-1, 1, 1) * one).sum(0, keepdim=True) for one in predicted.chunk(2, 2))
        apart = (shares.view(-1, 1, 1) * (predicted.chunk(2, 2)[0] - rate).square()).sum(0, keepdim=True)
        return torch.cat([rate, variance + apart], 2)

    def state(self) -> dict[str, Tensor]:
        return {"offset": self.offset}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.offset = state["offset"].clone()


def _negative_binomial(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """The log of its probability, elementwise; nearly a Poisson where the variance is hardly above the mean."""
    size = mean.square() / (variance - mean).maximum(1e-6 * mean)
    more = torch.lgamma(y + size) - torch.lgamma(size) - torch.lgamma(y + 1)
    return more - size * torch.log1p(mean / size) + y * (mean.log() - (mean + size).log())
