"""The weight of the KL term, beta, when `tempering` is auto.

    beta = 0.2 d^2 sqrt(n / 10,000),   n at most 10,000, and beta from 0.001 to 0.03

n is the number of rows in the round, and d measures how noisy their labels are, from 0 to 1. A larger beta
makes a network memorise noisy labels less; if the labels are clean, it only costs accuracy. All numbers were chosen on
the validation parts of image streams and small tables (docs/RESULTS.md). There the best beta was nearly 0 for MNIST and
0.03 for CIFAR-10, and smaller for fewer rows. Small tables with mostly random labels want more: up to `tempering=1`.

d is the leave-one-out error of a ridge regression on up to 500 rows, divided by the error of always predicting the most
frequent class. It is computed twice, from the inputs and from the features of the network as the last round left it,
and the smaller value is used.

If the targets are numbers or counts, beta is 0.3: the best of 0.003, 0.1, 0.3 and 1 on generated tables of 150 to 2,000
rows (Friedman's functions and linear ones).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl._core.devices import double
from evcl._core.randomness import Purpose
from evcl._core.settings import Settings, decided
from evcl.methods.agreement import left_out
from evcl.methods.data import TaskData
from evcl.methods.method import Round
from evcl.nn import outputs

NOISE_ROWS = 500  # maximum number of rows used to estimate d
RIDGE = 0.1  # as a fraction of the mean of the kernel's diagonal
UNKNOWN_NOISE = 0.2  # d for labels that are not classes, and the upper limit of d for inputs that are not real numbers
FULL_BETA_ROWS = 10_000  # beyond this many rows beta does not grow
BETA_LIMITS = (0.001, 0.03)  # limits of beta


def tempering(s: Settings, round_: Round) -> Tensor | float:
    """beta for this round: one number for all replicas, or [R, 1]."""
    if not isinstance(s.tempering, str):
        return decided(s.tempering)
    if round_.likelihood.usual_tempering is not None:
        return round_.likelihood.usual_tempering
    noise = sum(task.n * label_noise(task, round_) for task in round_.tasks) / max(1, round_.n)
    beta = 0.2 * noise**2 * min(1.0, round_.n / FULL_BETA_ROWS) ** 0.5
    limited: Tensor = beta.clamp(*BETA_LIMITS)
    return limited


@torch.no_grad()
def label_noise(task: TaskData, round_: Round) -> Tensor:
    """[R, 1]: d, how noisy a task's labels are."""
    mean = round_.posterior.mean
    if not round_.likelihood.softmax or task.y.shape[1] < 2:
        return mean.new_full((len(mean), 1), UNKNOWN_NOISE)
    rows, (data, from_below) = task.drawn(round_.generators(Purpose.DOUBT), NOISE_ROWS), task.seen_by(round_.network)
    x, y = task.take(rows)
    labels = double(F.one_hot(y, round_.network.classes(task.head)))
    by_chance = (1 - labels.mean(1).amax(1)).clamp_min(1 / y.shape[1])
    seen = data.take(rows)[0] if from_below else x
    features = outputs(round_.network, mean, round_.network.layout, seen, [], task=task.task, from_below=from_below)
    error = _error(features, labels) / by_chance
    other = _error(x.flatten(2), labels) / by_chance if x.is_floating_point() else error.new_tensor(UNKNOWN_NOISE)
    least: Tensor = torch.minimum(error, other).clamp(max=1).to(mean).unsqueeze(1)
    return least


def _error(x: Tensor, labels: Tensor) -> Tensor:
    """[R]: the fraction of labels [R, n, C] predicted wrongly from x [R, n, inputs], each from the other rows."""
    predicted = left_out(x, labels, RIDGE)
    wrong: Tensor = predicted.argmax(2) != labels.argmax(2)
    return wrong.double().mean(1)
