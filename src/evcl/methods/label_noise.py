"""Tempering, a part: beta, the weight of the KL term, follows from the noise of a round's labels.

    beta = b r,   r = min over ridges of sum_i |y_i - f_{-i}(x_i)|^2 / sum_i |y_i - mean y|^2,  at most 1

f_{-i} is the posterior mean of a linear regression of the labels, a column per class, that was given all rows but i: r
is the share of the labels' variance that cross-validated posteriors leave unexplained, 0 for labels without noise and 1
for random ones. A network that is made of clean labels should fit them; one that fits noisy labels memorises, and the
KL term is what holds it back. r is the smaller of two: from the inputs, and from the features of the network as the
last round left it. With K the kernel of the inputs,

    G = (K + ridge I)^-1,    y_i - f_{-i}(x_i) = (G Y)_i / G_ii

If the targets are numbers or counts, beta is 0.3: the best of 0.003, 0.1, 0.3 and 1 on generated tables of 150 to 2,000
rows (Friedman's functions and linear ones).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl._core.devices import double
from evcl._core.randomness import Purpose
from evcl._core.settings import Settings, decided
from evcl.methods.agreement import left_out
from evcl.methods.data import TaskData
from evcl.methods.method import Round
from evcl.methods.parts import Rules, rule
from evcl.nn import outputs

NOISE_ROWS = 500  # maximum number of rows that the noise is estimated from
MIN_BETA = 1e-4  # labels without any noise: with 0, there is no posterior
RIDGES = (0.01, 0.1, 1.0, 10.0, 100.0)  # as fractions of the mean of the kernel's diagonal; r is that of the best


@dataclass(frozen=True)
class Tempering(Rules):
    """The rules of `tempering=auto`."""

    prefix: ClassVar[str] = "tempering"
    noise: float = rule(
        0.1,
        "b: beta of a task whose labels are random; that of other tasks is in proportion to the noise of their labels",
        "ablated: beta from 0.0003 to 0.3 on validation data of random streams",
        high=1e6,
        open_low=True,
    )


def tempering(s: Settings, round_: Round) -> Tensor | float:
    """beta for this round: one number for all replicas, or [R, 1]."""
    if not isinstance(s.tempering, str):
        return decided(s.tempering)
    if round_.likelihood.usual_tempering is not None:
        return round_.likelihood.usual_tempering
    each = [task.n / max(1, round_.n) * label_noise(task, round_) for task in round_.tasks]
    return (Tempering.of(s).noise * torch.stack(each).sum(0)).clamp_min(MIN_BETA)


@torch.no_grad()
def label_noise(task: TaskData, round_: Round) -> Tensor:
    """[R, 1]: r, how noisy a task's labels are."""
    mean = round_.posterior.mean
    if not round_.likelihood.softmax or task.y.shape[1] < 2:
        return mean.new_ones(len(mean), 1)
    rows = task.drawn(round_.generators(Purpose.DOUBT), NOISE_ROWS).sort(1).values  # few rows: the same bits again
    data, from_below = task.seen_by(round_.network)
    x, y = task.take(rows)
    labels = double(F.one_hot(y, round_.network.classes(task.head)))
    seen = data.take(rows)[0] if from_below else x
    features = outputs(round_.network, mean, round_.network.layout, seen, [], task=task.task, from_below=from_below)
    share = unexplained(features, labels)
    if x.is_floating_point():
        share = torch.minimum(share, unexplained(x.flatten(2), labels))
    return share.to(mean).unsqueeze(1)


def unexplained(x: Tensor, labels: Tensor) -> Tensor:
    """[R]: r, for labels [R, n, C] and inputs [R, n, D]."""
    each = [(labels - left_out(x, labels, ridge)).square().sum((1, 2)) for ridge in RIDGES]
    total = (labels - labels.mean(1, keepdim=True)).square().sum((1, 2))
    share: Tensor = torch.fmin(torch.stack(each).amin(0), total) / total.clamp_min(1e-12)  # overflow explains nothing
    return share
