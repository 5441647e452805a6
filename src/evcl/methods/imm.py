"""Incremental moment matching (Lee, Kim, Jun, Ha and Zhang, 2017): train each task freely, and merge the solutions.

The weights mu_k with which task k ends are the mean of a Gaussian posterior; the mixture of these posteriors is
approximated by one Gaussian, whose mean or mode predicts every task:

    mean-IMM:  theta = sum_k mu_k / K
    mode-IMM:  theta = sum_k (F_k + e) mu_k / sum_k (F_k + e),   F_k the diagonal Fisher of task k at mu_k, e = 1e-8

The sums run over the tasks that used a weight: all tasks for a weight of the trunk, and one for a head of its own. So
a head that no other task uses keeps its weights. Training goes on from mu_k, not from theta.

Merging works if there is no ridge of high loss between the solutions. Three ways of training keep them close together:

    weight-transfer:  task k starts from mu_{k-1}. This is always so
    L2-transfer:      L_k = mean NLL + l2_transfer sum_i (theta_i - mu_{k-1,i})^2
    drop-transfer:    each hidden unit computes with mu_{k-1} with probability p = drop_transfer, and otherwise with
                      mu_{k-1} + (theta - mu_{k-1}) / (1 - p); drawn once per step

A batch norm's statistics do not change after the first task (evcl/nn/norms.py), so all solutions were trained with the
same ones, and the merged network uses them too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from evcl._core.randomness import Noise
from evcl._core.settings import ELASTIC, Setting, Settings
from evcl.methods.elastic_memory import Elastic
from evcl.methods.importance import fisher
from evcl.methods.memory import per_weight
from evcl.methods.method import Fit, Fitted, Learned, Learning, Method, Round, Tracker
from evcl.methods.terms import Gradients
from evcl.nn import BayesianNetwork, Gaussian, Linear, Part
from evcl.nn.layers import Conv

FISHER_EPSILON = 1e-8  # e: where no task has a Fisher, the mode is the mean


@dataclass(frozen=True)
class Memory:
    weight: Tensor = per_weight(low=0)  # sum_k w_k, with w_k = 1 or F_k + e
    moment: Tensor = per_weight()  # sum_k w_k mu_k


Weighting = Callable[[Fitted, Round, Settings], Tensor | float]


def learn(weighting: Weighting, memory: Memory, round_: Round, s: Settings) -> Learning:
    known = (memory.weight > 0).to(memory.weight)
    terms = [Elastic(round_.posterior, 2 * s.l2_transfer * known)]
    drops = isinstance(s.drop_transfer, Tensor) or s.drop_transfer > 0
    trackers = [DropTransfer(s.drop_transfer, units(round_.network))] if drops and round_.number > 0 else []
    fitted = yield Fit(round_.tasks, terms=terms, trackers=trackers)
    w = weighting(fitted, round_, s) * fitted.used
    return Learned(fitted.q, Memory(memory.weight + w, memory.moment + w * fitted.q.mean))


class DropTransfer(Tracker):
    """Compute each step's gradient at mu + m (theta - mu), with m = 0 or 1 / (1 - p) for each hidden unit."""

    def __init__(self, p: Tensor | float, units: Sequence[Sequence[str]]) -> None:
        self.p, self.units = p, units

    def begin(self, q: Gaussian, part: Part) -> None:
        self.start, self.kept, self.factor = q.mean.clone(), q.mean.clone(), torch.ones_like(q.mean)
        self.views = [[part.layout.view(self.factor, name) for name in names] for names in self.units]
        self.draws = [views[0].new_empty(views[0].shape[:2]) for views in self.views]

    def perturb(self, q: Gaussian, noise: Noise) -> None:
        for views, draw in zip(self.views, self.draws, strict=True):
            on = (noise.shared().uniform_(draw) >= self.p).to(draw) / (1 - self.p)
            for view in views:
                view.copy_(on.view(*on.shape, *[1] * (view.dim() - 2)))
        self.kept.copy_(q.mean)
        q.mean.sub_(self.start).mul_(self.factor).add_(self.start)

    def before(self, q: Gaussian, grads: Gradients) -> None:
        q.mean.copy_(self.kept)
        grads.mean.mul_(self.factor)

    def buffers(self) -> list[Tensor]:
        return [self.start, self.kept, self.factor, *self.draws]


def units(network: BayesianNetwork) -> list[list[str]]:
    """The names of the weights into the units of each linear layer and convolution of the trunk: weight and bias."""
    layers = (layer for layer in network.trunk_layers() if type(layer) in (Linear, Conv))
    return [list(layer.names.values()) for layer in layers if not layer.rows]


def equal(fitted: Fitted, round_: Round, s: Settings) -> float:
    return 1.0


def curvature(fitted: Fitted, round_: Round, s: Settings) -> Tensor:
    return fisher(fitted, round_, Settings({**s, "fisher_scale": "none", "fisher_draws": 0})) + FISHER_EPSILON


def predictor(memory: Memory, posterior: Gaussian, task: int | None) -> Gaussian:
    """The merged weights; those that no task has used are as they were."""
    merged = memory.moment / memory.weight
    return Gaussian(torch.where(memory.weight > 0, merged, posterior.mean), None)


TRANSFER = {
    "l2_transfer": Setting(
        1e-3,  # of 0, 3e-4, 1e-3, 3e-3, 0.01 and 0.1 the best on validation data of permuted-digits and split-digits
        "weight of the squared distance from the weights at the end of the last task",
        high=1e6,
    ),
    "drop_transfer": Setting(
        0.0,  # the best of 0, 0.25 and 0.5 there
        "probability with which a hidden unit computes with the weights of the last task's end, drawn once per step",
        high=0.99,
    ),
}

IMM_MEAN = Method(
    name="imm-mean",
    learn=partial(learn, equal),
    memory=Memory,
    settings=TRANSFER,
    predictor=predictor,
)
FISHER = ("fisher", "fisher_examples", "fisher_temperature", "fisher_spread")
IMM_MODE = Method(
    name="imm-mode",
    learn=partial(learn, curvature),
    memory=Memory,
    settings={**TRANSFER, **{name: ELASTIC[name] for name in FISHER}},
    predictor=predictor,
    apart=True,
)
