"""Kronecker-factored importance (`importance="kfac"`): the penalty of a layer depends on how its weights move together.

    lambda/2 sum_l tr(D_l^T G_l D_l A_l),   D_l = [W_l, b_l] - [W*_l, b*_l]

G_l (x) A_l approximates the Fisher of layer l (curvature/kfac.py), in the units of the diagonal Fisher. With the
default `fisher_scale`, G_l sums n_k G_kl, and the penalty is divided by N_t. Weights without factors have the
diagonal Fisher. Variances are penalised by the diagonal of G_l (x) A_l.

The Fishers of several tasks add up to a sum of products. `kfac_merge` says how one product stands for them (see
posterior/kronecker.py); or `tasks` keeps every product, so that memory and the time of a step grow with their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from evcl._core.randomness import Purpose
from evcl._core.settings import ELASTIC, Setting, Settings
from evcl.curvature import blocks, kfac
from evcl.methods.elastic_memory import Elastic, Importance, Memory, elastic
from evcl.methods.importance import divisor, estimates, fisher, scale
from evcl.methods.measures import IMPORTANCE
from evcl.methods.method import ALONE, Fitted, Learning, Method, Past, Round
from evcl.methods.terms import Gradients, Number, Term
from evcl.nn import Gaussian, Layout
from evcl.nn.layer import add_product
from evcl.posterior.kronecker import Block, Factors, diagonal, merged, times

MERGE = Setting(
    "nearest",
    "how the Kronecker factors of several tasks become one pair: by adding them (sum), by adding them after balancing "
    "their traces (pi), or as the nearest product to the sum of products (nearest); or keep every task's pair, which "
    "is exact and slower with each task (tasks)",
    choices=("nearest", "sum", "pi", "tasks"),
)


@dataclass(frozen=True)
class Factored:
    """1/2 sum_l sum_k tr(D_l^T G_kl D_l A_kl) over the means."""

    anchor: Gaussian
    factors: Factors
    blocks: Mapping[str, Block]
    bound: list[tuple[Tensor, Tensor, list[Bound]]] = field(default_factory=list, init=False, repr=False, compare=False)
    name: ClassVar[str] = "elastic"

    def loss(self, q: Gaussian) -> Tensor:
        layout, loss = q.layout, q.mean.new_zeros(len(q.mean))
        assert layout is not None
        for block, a, g in self._used(layout):
            d = block.matrix(layout, q.mean - self.anchor.mean, g.shape[-1])
            loss = loss + 0.5 * (d * times(a, g, d)).sum((1, 2))
        return loss

    def curvature(self, layout: Layout) -> Tensor:
        """[R, P]: the diagonal of sum_k G_k (x) A_k over all weights."""
        total = torch.zeros_like(self.anchor.mean)
        for block, a, g in self._used(layout):
            left, right = diagonal(g), a if block.table else diagonal(a)
            block.add(layout, total, (left.unsqueeze(3) * right.unsqueeze(2)).sum(1))
        return total

    def add_gradient(self, q: Gaussian, grads: Gradients) -> None:
        """sum_k G_k D A_k. A step always passes the same buffers, so their views are made once."""
        if not (self.bound and self.bound[0][0] is q.mean and self.bound[0][1] is grads.mean):
            bounds = [Bound(*one, self.anchor.mean, q, grads) for one in self._used(grads.layout)]
            self.bound[:] = [(q.mean, grads.mean, bounds)]
        for one in self.bound[0][2]:
            one.add_gradient()

    def _used(self, layout: Layout) -> list[tuple[Block, Tensor, Tensor]]:
        """The blocks of this layout, with their factors."""
        known = [(self.blocks[key], *pair) for key, pair in self.factors.items()]
        return [one for one in known if one[0].weight in layout.shapes]


class Bound:
    """A block bound to the buffers of a step: two matrix products, into the gradient."""

    def __init__(self, block: Block, a: Tensor, g: Tensor, anchor: Tensor, q: Gaussian, grads: Gradients) -> None:
        layout, (r, k, o) = grads.layout, g.shape[:3]
        views = [block.views(layout, flat, o) for flat in (q.mean, anchor, grads.mean)]
        i = views[0][0].shape[2]
        inputs = i + (block.bias is not None)
        self.d, self.left = g.new_empty(r, o, inputs), g.new_empty(r, k * o, inputs)
        self.g, self.shape, self.table = g.reshape(r, k * o, o), (r, k, o, inputs), block.table
        a = a.unsqueeze(2) if block.table else a.flatten(1, 2)  # [R, K, 1, i], or the A_k below each other: [R, K*i, i]
        self.parts: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []  # of the weights, and of the biases
        for (now, then, out), at in zip(zip(*views, strict=True), (slice(0, i), slice(i, inputs)), strict=True):
            if now is not None and then is not None and out is not None:
                self.parts.append((now, then, self.d[:, :, at], out, a[..., at]))

    def add_gradient(self) -> None:
        for now, then, d, _, _ in self.parts:
            torch.sub(now, then, out=d)
        torch.matmul(self.g, self.d, out=self.left)
        left = self.left.view(self.shape)
        if self.table:
            _, _, _, out, a = self.parts[0]
            out += (left * a).sum(1)
            return
        left = left.transpose(1, 2).flatten(2)  # [R, o, K*i]: the G_k D side by side
        for _, _, _, out, a in self.parts:
            add_product(out, left, a)


@dataclass(frozen=True)
class KroneckerImportance(Importance):
    """Importance as Kronecker factors, and a matrix penalty for the weights that have them."""

    def penalty(self, memory: Memory, s: Settings, round_: Round, part: Number = 1.0) -> list[Term]:
        """`memory.factors`: the key of a block -> A [R, K, i, i], or [R, K, i] if diagonal; G [R, K, o, o]."""
        if not memory.factors:
            return super().penalty(memory, s, round_, part)
        part = part.clamp(max=1.0) if isinstance(part, Tensor) else min(1.0, part)  # above 1 only for a diagonal Fisher
        rest = elastic(memory, s, round_.n, part)
        layout, ones = round_.network.layout, torch.ones_like(rest.importance[:, :1])
        weight = (ones * part * s.strength / divisor(round_.n, s)).view(-1, 1, 1, 1)
        scaled = {key: (a, g * weight) for key, (a, g) in memory.factors.items()}
        moved = Factored(memory.prior, scaled, blocks(round_.network, layout))
        return [moved, Elastic(memory.prior, rest.importance, rest.importance + moved.curvature(layout))]

    def means(self, memory: Memory, round_: Round) -> Tensor | None:
        """The precision of the last posterior would be a second, diagonal estimate of the curvature that the factors
        estimate, and the past would count twice. So the KL leaves the means of weights with factors to the penalty, and
        holds only their variances.
        """
        return 1 - factored(memory, round_) if memory.factors else None

    def remembered(
        self, memory: Memory, fitted: Fitted, round_: Round, s: Settings, beta: Mapping[int, Tensor] | None = None
    ) -> Memory:
        factors, rest = measured(memory, fitted, round_, s)
        return replace(memory, factors=factors).after(fitted, round_, rest, s.fisher_decay, beta)


MEASURES: dict[str, Importance] = {**IMPORTANCE, "kfac": KroneckerImportance(fisher)}
"""All measures that the setting `importance` chooses from."""


def with_measures(method: Method) -> Method:
    """Let the setting `importance` choose the measure of a method whose `learn` takes one."""

    def learn(memory: Memory, round_: Round, s: Settings, past: Past = ALONE) -> Learning:
        return method.learn(memory, round_, s, past, MEASURES[s.importance])

    return replace(
        method, learn=learn, settings={**method.settings, "importance": ELASTIC["importance"], "kfac_merge": MERGE}
    )


def factored(memory: Memory, round_: Round) -> Tensor:
    """[R, P]: 1 for weights with factors, otherwise 0."""
    mask, layout = torch.zeros_like(round_.posterior.mean), round_.network.layout
    known = blocks(round_.network, layout)
    for key, (_, g) in memory.factors.items():
        for view in known[key].views(layout, mask, g.shape[-1]):
            if view is not None:
                view.fill_(1.0)
    return mask


def measured(memory: Memory, fitted: Fitted, round_: Round, s: Settings) -> tuple[Factors, Tensor]:
    """At the end of a round: the factors after it, and the importance [R, P] of weights without factors."""
    ones, whole = torch.ones_like(fitted.q.mean[:, :1]), torch.zeros_like(fitted.q.mean)
    decay, trained = (ones * s.fisher_decay).view(-1, 1, 1, 1), blocks(fitted.network, fitted.layout)
    factors = {key: (a, decay * g) if key in trained else (a, g) for key, (a, g) in memory.factors.items()}
    total = torch.zeros_like(fitted.own.mean)
    for i, task in enumerate(round_.tasks):
        draws = estimates(kfac, fitted, task, round_.generators(Purpose.FISHER, i), round_, s)
        rest = torch.stack([one.diagonal for one in draws]).mean(0)
        pairs = {
            key: tuple(map(_mean, zip(*(one.factors[key] for one in draws), strict=True))) for key in draws[0].factors
        }
        sums = [(a if a.dim() == 2 else diagonal(a)).sum(1, True) * diagonal(g).sum(1, True) for a, g in pairs.values()]
        whole_sum = torch.cat([rest.sum(1, keepdim=True), *sums], 1).sum(1, keepdim=True)
        by = ones * scale(whole_sum, fitted, task, s)
        total = total + by * rest
        for key, (a, g) in pairs.items():
            new = a.unsqueeze(1), (by.unsqueeze(2) * g).unsqueeze(1)
            factors[key] = merged(factors[key], new, s.kfac_merge) if key in factors else new
    fitted.network.layout.scatter_(whole, fitted.layout, total)
    return factors, whole


def _mean(found: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(found)).mean(0)
