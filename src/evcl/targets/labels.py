"""Several labels at once: p(y | outputs) = prod_d p_d^y_d (1 - p_d)^(1 - y_d), p = sigmoid(outputs)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from evcl import metrics
from evcl.targets.answers import Array, Measures, Outcome, Predictions
from evcl.targets.likelihood import Estimate, drawn, known, own_columns, uniform, weighted
from evcl.targets.scale import Scale
from evcl.targets.values import Values


class Chances(NamedTuple):
    """The probabilities of labels [N, D], and the mean entropy of single draws of the weights."""

    p: Tensor
    within: Tensor

    @property
    def expected(self) -> Tensor:
        return self.p

    @property
    def entropy(self) -> Tensor:
        return _entropy(self.p)

    @property
    def parts(self) -> list[Tensor]:
        entropy = self.entropy
        aleatoric = torch.minimum(self.within, entropy)
        return [(self.p > 0.5).long(), self.p, entropy, aleatoric, entropy - aleatoric]

    @property
    def doubt(self) -> Tensor:
        return self.entropy.mean(1) / math.log(2)

    def widened(self, rows: Tensor, edge: Outcome, far: Tensor, spread: Tensor) -> Chances:
        return self

    def errors(self, y: Tensor) -> Tensor:
        return (y - self.p).square()

    def answer(self, fields: list[Array]) -> Predictions:
        return Predictions(*fields)

    def measure(self, y: Tensor) -> Measures:
        """Accuracy over all labels, mean NLL of an example, and expected calibration error."""
        p, true = self.p.double().cpu().numpy(), y.cpu().numpy()
        both, right = np.stack([1 - p.ravel(), p.ravel()], 1), true.ravel().astype(int)
        accuracy = float(((p > 0.5) == (true > 0.5)).mean())
        nll = metrics.nll(both, right) * p.shape[1]
        return Measures(accuracy, nll, metrics.expected_calibration_error(both, right))


class Bernoulli(Values):
    """Any number of yes-or-no labels, y [..., D] of 0 and 1: `p(y_d = 1 | outputs) = sigmoid(outputs_d)`."""

    name = "bernoulli"
    wanted = "0 or 1"

    def wrong(self, y: Tensor) -> Tensor:
        return (y != 0) & (y != 1)

    def nll(self, outputs: Tensor, y: Tensor, columns: Tensor | None) -> Tensor:
        z = own_columns(outputs, columns)
        return F.binary_cross_entropy_with_logits(z, y, reduction="none").sum(-1)

    def predict(self, outputs: Tensor) -> Tensor:
        """[M, 2 D]: the probability of each label, and the entropy of that prediction, in nats."""
        p = outputs.sigmoid()
        return torch.cat([p, _entropy(p)], -1)

    def outcome(self, averaged: Tensor, scale: Scale, draws: int) -> Chances:
        return Chances(*averaged.chunk(2, 1))

    def score(self, predicted: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The NLL, and the fraction of the labels that are right."""
        p, _ = predicted.chunk(2, -1)
        tiny = torch.finfo(p.dtype).tiny
        nll = -(y * p.clamp_min(tiny).log() + (1 - y) * (1 - p).clamp_min(tiny).log()).sum(-1)
        return nll, ((p > 0.5) == (y > 0.5)).to(p).mean(-1)

    def surprise(self, outputs: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
        p = outputs.sigmoid()
        return weighted((y - p).square(), weights) / weighted(p * (1 - p), weights).clamp_min(1e-12)

    def known(self, predicted: Tensor, draws: int, weights: Tensor | None) -> Tensor:
        """[R]: how far the predictions [R, n, ...], averaged over this many draws, are known: see `known`; in nats."""
        p, within = predicted.chunk(2, -1)
        return known(within, draws / (draws - 1) * (_entropy(p) - within), weights)

    def fisher_targets(self, outputs: Tensor, y: Tensor, weights: Tensor, how: Estimate) -> list[Tensor]:
        """d log p / d z = y - p(z), whose mean square is p (1 - p). Temperature has no meaning here."""
        z = outputs
        p, root = z.detach().sigmoid(), weights.unsqueeze(-1).sqrt()
        if how.kind == "exact":
            wide = root * (p * (1 - p)).sqrt()
            return [(wide[..., d] * z[..., d]).sum() for d in range(z.shape[-1])]
        if how.kind == "sampled":
            y = (drawn(uniform, p, how.generators) < p).to(p)
        return [(root * (y - p) * z).sum()]

    def skip_labels(self, outputs: Tensor, generators: Sequence[torch.Generator] | None) -> None:
        drawn(uniform, outputs, generators)


def _entropy(p: Tensor) -> Tensor:
    """The entropy of yes-or-no labels of these probabilities, in nats."""
    entropy: Tensor = torch.special.entr(p) + torch.special.entr(1 - p)
    return entropy
