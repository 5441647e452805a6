"""Kronecker-factored EWC (Ritter, Botev and Barber, 2018): the penalty on a weight depends on the others of
its layer.

L_t = mean NLL + lambda/2 sum_l tr(D_l^T G_l D_l A_l),   D_l = [W_l, b_l] - [W*_l, b*_l]

G_l (x) A_l is the Fisher of layer l (evcl/curvature/kfac.py), summed over tasks factor by factor. To the diagonal
of each task's factors, the damping adds rho times its mean, so that weights of inactive units are protected too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl._core.settings import Setting, Settings
from evcl.curvature import Factors, kfac
from evcl.methods import Fit, Gradients, Learned, Learning, Method, Round, per_layer, register
from evcl.nn import Gaussian


@dataclass(frozen=True)
class Memory:
    factors: Factors = per_layer()  # maps the name of a weight to (A, G)


@dataclass(frozen=True)
class Kronecker:
    anchor: Gaussian
    factors: Factors
    weight: Tensor  # [R, 1, 1]

    def moved(self, q: Gaussian) -> Iterator[tuple[str, str, Tensor, Tensor]]:
        """For each layer of the fit: its names, D [R, o, i + 1], and lambda G D A."""
        change = Gaussian(q.mean - self.anchor.mean, None, q.layout)
        for weight, (a, g) in self.factors.items():
            if weight in q.layout.shapes:
                bias = weight.removesuffix("weight") + "bias"
                d = torch.cat([change.part(weight), change.part(bias).unsqueeze(2)], 2)[:, : g.shape[1]]
                yield weight, bias, d, self.weight * (g @ d @ a)

    def loss(self, q: Gaussian) -> Tensor:
        return sum(((d * gda).sum((1, 2)) / 2 for *_, d, gda in self.moved(q)), q.mean.new_zeros(len(q.mean)))

    def add_gradient(self, q: Gaussian, grads: Gradients) -> None:
        for weight, bias, d, gda in self.moved(q):  # a head may have grown; its new rows have no penalty
            grads.part(weight)[:, : d.shape[1]].add_(gda[..., :-1])
            grads.part(bias)[:, : d.shape[1]].add_(gda[..., -1])


def damped(factor: Tensor, rho: Tensor | float) -> Tensor:
    mean = factor.diagonal(dim1=1, dim2=2).mean(1, keepdim=True)
    return factor + torch.diag_embed((rho * mean).expand(factor.shape[:2]))


def added(old: Tensor, new: Tensor) -> Tensor:
    more = new.shape[1] - old.shape[1]
    return F.pad(old, (0, more, 0, more)) + new


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    weight = (s.strength * torch.ones_like(round_.posterior.mean[:, :1])).unsqueeze(2)
    fitted = yield Fit(round_.tasks, terms=[Kronecker(round_.posterior, memory.factors, weight)])
    factors = dict(memory.factors)
    for task in round_.tasks:
        x, y = (part.expand(len(fitted.q.mean), *part.shape[1:]) for part in (task.x, task.y))
        new = kfac(fitted.network, fitted.own.mean, fitted.layout, x, y, [task.head], likelihood=round_.likelihood)
        for name, pair in new.items():
            found = tuple(damped(factor, s.damping) for factor in pair)
            factors[name] = tuple(map(added, factors[name], found)) if name in factors else found
    return Learned(fitted.q, Memory(factors))


register(
    Method(
        name="plugin-kfac-ewc",
        summary="plain weights, held by a Kronecker-factored Fisher of each layer",
        bayesian=False,
        learn=learn,
        memory=Memory,
        settings={
            "strength": Setting(3.0, "lambda, the weight of the penalty"),
            "damping": Setting(0.1, "rho, added to the factors' diagonals as a part of their mean"),
        },
        apart=True,
    ),
    overwrite=True,
)
