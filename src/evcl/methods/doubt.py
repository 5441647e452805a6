"""How much the KL term weighs: beta, where `tempering` is auto.

    beta = 0.2 d^2 sqrt(n / 10,000),   n at most 10,000, and beta from 0.001 to 0.03

n is the number of rows in the round, and d how doubtful their labels are, from 0 to 1. Noise on the weights keeps a
network from learning doubtful labels by heart. Where labels are clear, it only costs accuracy.

d is the error of a ridge regression that predicts each of up to 500 rows from the others, divided by the error of
always naming the most frequent class. It is asked twice, with the inputs and with the features of the network as the
last round left it, and the better one counts. With K the kernel of the inputs and Y the labels, one column a class,

    G = (K + ridge I)^-1,    label of row i less its prediction from the others = (G Y)_i / G_ii
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl._core.settings import Settings, decided
from evcl.likelihoods import CATEGORICAL
from evcl.methods.data import TaskData
from evcl.methods.method import Round
from evcl.nn import outputs

ASKED = 500  # rows that tell how doubtful labels are
RIDGE = 0.1  # of the mean of the kernel's diagonal
UNKNOWN = 0.2  # the d of labels that are no classes, and at most that of inputs that are no numbers
ENOUGH = 10_000  # rows
BETAS = (0.001, 0.03)


def tempering(s: Settings, round_: Round) -> Tensor | float:
    """beta in this round: one for all replicas, or [R, 1]."""
    if not isinstance(s.tempering, str):
        return decided(s.tempering)
    doubts = sum(task.y.shape[1] * doubt(task, round_) for task in round_.tasks) / max(1, round_.n)
    beta = 0.2 * doubts**2 * min(1.0, round_.n / ENOUGH) ** 0.5
    found: Tensor = beta.clamp(*BETAS)
    return found


@torch.no_grad()
def doubt(task: TaskData, round_: Round) -> Tensor:
    """d of a task's labels, [R, 1]."""
    mean = round_.posterior.mean
    if round_.likelihood is not CATEGORICAL or task.y.shape[1] < 2:
        return mean.new_full((len(mean), 1), UNKNOWN)
    drawn = torch.stack([torch.randperm(task.y.shape[1], generator=g)[:ASKED] for g in round_.generators("doubt")])
    x, y = task.take(drawn.to(task.y.device))
    labels = F.one_hot(y, round_.network.classes(task.head)).double()
    by_chance = (1 - labels.mean(1).amax(1)).clamp_min(1 / y.shape[1])
    features = outputs(round_.network, mean, round_.network.layout, x, [])
    found = _error(features, labels) / by_chance
    other = _error(x.flatten(2), labels) / by_chance if x.is_floating_point() else found.new_tensor(UNKNOWN)
    least: Tensor = torch.minimum(found, other).clamp(max=1).to(mean).unsqueeze(1)
    return least


def _error(x: Tensor, labels: Tensor) -> Tensor:
    """[R]: how many labels [R, n, C] are predicted wrongly from x [R, n, inputs], each by the other rows."""
    x = x.double() - x.double().mean(1, keepdim=True)
    kernel = x @ x.mT
    scale = kernel.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-12).view(-1, 1, 1)
    identity = torch.eye(x.shape[1], dtype=kernel.dtype, device=kernel.device)
    inverse = torch.linalg.inv(kernel + scale * (1 + RIDGE * identity))  # the 1 is for a bias
    predicted = labels - inverse @ labels / inverse.diagonal(dim1=1, dim2=2).unsqueeze(2)
    wrong: Tensor = predicted.argmax(2) != labels.argmax(2)
    return wrong.double().mean(1)
