"""Classification: p(y | outputs) = softmax(outputs)[y].

This is the slow, simple form of what nn/chain.py, native.c and kernels/gpu.py compute by hand for multilayer
perceptrons.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from evcl import metrics
from evcl._core.inputs import Label, labels
from evcl.nn.slots import foreign
from evcl.targets.answers import Measures
from evcl.targets.likelihood import Estimate, Likelihood, drawn
from evcl.targets.scale import Scale


class Categorical(Likelihood):
    """One of several classes: `p(y | outputs) = softmax(outputs)[y]`."""

    name = "categorical"
    compiled = softmax = keeps_rows = True

    def read(self, x: Tensor, y: object, verb: str) -> list[Label]:
        return labels(y, len(x))

    def given(self, y: Tensor, classes: Sequence[Label], scale: Scale | None) -> list[Label]:
        return [classes[i] for i in y.tolist()]

    def doubt(self, averaged: Tensor, scale: Scale | None, draws: int) -> Tensor:
        return normalised_entropy(averaged)

    def described(self, scales: Mapping[str, Scale]) -> dict[str, object]:
        return {}

    def measure(self, averaged: Tensor, places: Tensor) -> Measures:
        """How good probabilities [N, classes] are for labels at these places [N]; beyond the last: unknown ones."""
        known = np.concatenate([averaged.cpu().double().numpy(), np.zeros((len(averaged), 1))], 1)
        right = known.argmax(1) == places.numpy()
        ece = metrics.expected_calibration_error(known, places)
        return Measures(float(right.mean()), metrics.nll(known, places), ece)

    def nll(self, outputs: Tensor, y: Tensor, columns: Tensor | None) -> Tensor:
        """[M]: the cross-entropy over the classes of each example's head."""
        if columns is not None:
            outputs = outputs.masked_fill(foreign(columns, outputs.shape[1]), -torch.inf)
        return F.cross_entropy(outputs, y, reduction="none")

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(-1)

    def score(self, predicted: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        p = predicted.gather(2, y.unsqueeze(2)).squeeze(2)
        return -p.clamp_min(torch.finfo(p.dtype).tiny).log(), (predicted.argmax(2) == y).to(p.dtype)

    def fisher_targets(self, outputs: Tensor, y: Tensor, weights: Tensor, how: Estimate) -> list[Tensor]:
        """The weights p(c|x) and those of the examples enter as square roots, because the gradient is squared."""
        log_p = F.log_softmax(how.cooled(outputs), dim=2).flatten(0, 1)
        p = log_p.detach().exp()
        log_p = log_p * (how.temperature * weights.sqrt()).reshape(-1, 1)
        if how.kind == "exact":
            return [(p[:, c].sqrt() * log_p[:, c]).sum() for c in range(p.shape[1])]
        if how.kind == "sampled":
            y = _labels(p.unflatten(0, y.shape), how.generators)
        return [log_p.gather(1, y.reshape(-1, 1)).sum()]

    def softmaxes(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """One per example: the logits [M, 1, classes] and the class [M, 1]."""
        return outputs.unsqueeze(1), y.unsqueeze(1)

    def skip_labels(self, outputs: Tensor, generators: Sequence[torch.Generator] | None) -> None:
        _labels(torch.ones_like(outputs), generators)


CATEGORICAL = Categorical()
"""The likelihood that learners use."""


def normalised_entropy(p: Tensor) -> Tensor:
    """[N]: the entropy of these probabilities [N, classes] as a fraction of its maximum, log(classes)."""
    entropy: Tensor = torch.special.entr(p).sum(1)
    return entropy / math.log(max(2, p.shape[1]))


def _labels(p: Tensor, generators: Sequence[torch.Generator] | None) -> Tensor:
    """[R*n, 1]: a label drawn from each of p [R, n, classes]."""
    return drawn(lambda one, source: torch.multinomial(one, 1, generator=source), p, generators).flatten(0, 1)
