"""Noisy K-FAC (Zhang, Sun, Duvenaud and Grosse, 2018), made continual: a matrix normal for each layer.

L_t = mean NLL + beta/N_t KL(q_t || q_{t-1}), minimised by natural-gradient steps. The [W, b] of a layer, a matrix with
a row per output, has the mean M and the covariance beta/N_t G_d^-1 (x) A_d^-1, where

    A_d = A / pi + c I,   G_d = pi G + c I,   c^2 = beta / (N_t s_0^2),   pi^2 = mean diag A / mean diag G

G (x) A is the Fisher of all tasks so far. The factors of this task (curvature/kfac.py) are running means; they are
merged with those of earlier tasks, divided by N_t, into the `nearest` product (kronecker.py). s_0^2 is the variance of
the first prior: without data, the covariance is s_0^2 I. With B_d and H_d made in the same way from the factors of
earlier tasks alone, the precision of q_{t-1} is N_t/beta H_d (x) B_d. A step is

    W = M + (beta/N_t)^1/2 L_G Z L_A^T,   L_A L_A^T = A_d^-1,   L_G L_G^T = G_d^-1
    M <- M - lr G_d^-1 (gradient of the mean NLL at W + H_d (M - M_{t-1}) B_d) A_d^-1

The step is shortened if tr(D^T G_d D A_d), D the change of M, exceeds `clip`, summed over the layers. Every
`factor_every` steps, the factors are estimated at W, exactly over the classes; every `inverse_every` steps, L_A and L_G
are computed from them. Weights without factors (norms, free parameters, grouped convolutions) have a diagonal
covariance from squared gradients, as in VOGN. Predictions draw each weight from its marginal, with the variance
beta/N_t (G_d^-1)_oo (A_d^-1)_ii.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.randomness import Noise
from evcl._core.settings import BAYESIAN, Setting, Settings
from evcl.curvature import StepCurvature, blocks
from evcl.methods.elastic_memory import Elastic
from evcl.methods.kl import first_precision
from evcl.methods.kronecker import Factored
from evcl.methods.label_noise import tempering
from evcl.methods.memory import per_layer, per_weight
from evcl.methods.method import Fit, Learned, Learning, Method, Round
from evcl.methods.natural import NO_MEMORY, WITHOUT, AtEnd, NaturalRule, Source
from evcl.methods.terms import Number, Term
from evcl.nn import BayesianNetwork, Gaussian, Layout
from evcl.posterior.kronecker import TINY, Block, Factors, Pair, Root, diagonal, merged


@dataclass(frozen=True)
class Memory:
    """Fishers are sums over the examples of all tasks, without beta: a later task may have another one."""

    anchor: Tensor = per_weight(start="prior")  # M_{t-1}
    fisher: Tensor = per_weight(low=0)  # of weights without factors; 0 for the others
    factors: Factors = per_layer()  # key of a block -> A [R, 1, i, i], or [R, 1, i] if diagonal; G [R, 1, o, o]

    @staticmethod
    def lasting(s: Settings) -> str:
        return "the factors of layers"


def shapes(block: Block, layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of A and G, without the replica axis."""
    i, o = block.sizes(layout)
    return (i,) if block.table else (i, i), (o, o)


def damped(a: Tensor, g: Tensor, prior: Tensor) -> Pair:
    """A_d and G_d from A, G and c^2 = `prior` [R, 1, 1, 1]; all factors are [R, 1, ...].

    G_d (x) A_d stands for G (x) A + c^2 I. It is larger, by c (pi G (x) I + I (x) A / pi). The excess protects weights
    of inactive units, whose rows in A and G are 0.
    """
    inner = a if a.dim() == 3 else diagonal(a)
    ratio = inner.mean(2) / diagonal(g).mean(2).clamp_min(TINY)
    pi, c = ratio.clamp(TINY, 1 / TINY).sqrt().view(-1, 1, 1, 1), prior.sqrt()
    eye_g = torch.eye(g.shape[-1], dtype=g.dtype, device=g.device)
    if a.dim() == 3:
        return a / pi[..., 0] + c[..., 0], pi * g + c * eye_g
    return a / pi + c * torch.eye(a.shape[-1], dtype=a.dtype, device=a.device), pi * g + c * eye_g


class LayerPosterior:
    """The factors of one block, and the root of its covariance over D [R, o, i], which is beta/N times a product."""

    def __init__(self, block: Block, layout: Layout, like: Tensor, old: Pair | None, prior: Tensor) -> None:
        """`old`: the factors of earlier tasks, divided by N; `prior`: c^2 [R, 1, 1, 1]."""
        self.block, self.layout, self.old, self.prior = block, layout, old, prior
        self.a, self.g = (like.new_zeros(len(like), *shape) for shape in shapes(block, layout))
        self.batch = self.a.clone(), self.g.clone()  # of the last batch; a and g are running means
        self.root = Root(self.g.clone(), self.a.clone())

    def refresh(self) -> None:
        """Compute the root from the factors."""
        pair = self.a.unsqueeze(1), self.g.unsqueeze(1)
        root = Root.of(*damped(*(pair if self.old is None else merged(self.old, pair, "nearest")), self.prior))
        self.root.left.copy_(root.left)
        self.root.right.copy_(root.right)

    def of(self, flat: Tensor) -> Tensor:
        """The block's part of `flat` [R, P]."""
        return self.block.matrix(self.layout, flat, self.g.shape[1])

    def buffers(self) -> list[Tensor]:
        return [self.a, self.g, self.root.left, self.root.right]


class NoisyKfacRule(NaturalRule):
    """`old`: the factors of earlier tasks, divided by N; `prior` [R, P]: c^2; `weight`: beta / N."""

    def __init__(
        self, *args: Any, network: BayesianNetwork, old: Mapping[str, Pair], prior: Tensor, weight: Number
    ) -> None:
        super().__init__(*args)
        if self.pull is None or self.pull.mean is None or self.layout is None:
            raise EvclError("NoisyKfacRule needs a term that holds the means")
        self.held, self.weight = self.pull.mean, weight
        self.layers, like = {}, self.mean
        for key, block in blocks(network, self.layout).items():
            own = of_block(block, network.layout, prior)
            self.layers[key] = LayerPosterior(block, self.layout, like, old.get(key), own)
        self.means = [tensor for layer in self.layers.values() for tensor in layer.batch]
        self.squares, self.rest = torch.zeros_like(like), torch.ones_like(like)
        for layer in self.layers.values():  # 1 for weights without factors
            layer.block.add(self.layout, self.rest, -torch.ones_like(layer.root.marginals()))

    def due(self, every: int) -> bool:
        return (int(self.count) - 1) % every == 0

    def source(self, network: BayesianNetwork, layout: Layout, pool: Any, at: Callable[..., Source]) -> Source:
        theta, z = torch.zeros_like(self.grads[:1]), torch.zeros_like(self.mean)
        gradient = at(theta, self.grads[:1])
        curvature = StepCurvature(network, layout, pool, "exact", factored=True)

        def compute(rows: Tensor, noise: Noise) -> Tensor:
            noise.shared().normal_(z)
            self.draw(z, theta[0])
            if not self.due(self.settings.factor_every):
                return gradient(rows, noise)
            nll = curvature(theta[0], rows, self.grads[0], self.grads[1], noise)
            for key, layer in self.layers.items():
                for kept, new in zip(layer.batch, curvature.found.factors[key], strict=True):
                    kept.copy_(new)
            return nll

        return compute

    def draw(self, z: Tensor, theta: Tensor) -> None:
        """Write a draw of the weights into theta; in a task's first step, it is one from the marginals."""
        first = int(self.count) == 1
        torch.addcmul(self.mean, self.variance.sqrt() if first else self.variance.sqrt() * self.rest, z, out=theta)
        for layer in () if first else self.layers.values():
            layer.block.add(layer.layout, theta, layer.root.drawn(layer.of(z * self.weight**0.5)))

    def step(self) -> tuple[Tensor, Tensor]:
        s, variance = self.settings, self.variance
        if self.due(s.factor_every):
            self._average()
        stiff = (self.squares + self.held.w).where(self.rest > 0, 1.0)
        if self.due(s.inverse_every):
            variance = self.rest / stiff
            for layer in self.layers.values():
                layer.refresh()
                layer.block.add(layer.layout, variance, layer.root.marginals())
            variance = self.weight * variance
        g = self.grads[0] + self.held.w * (self.mean - self.held.c)
        change = self.rest * g / stiff
        for layer in self.layers.values():
            layer.block.add(layer.layout, change, layer.root.solved(layer.of(g)))
        moved = self.lr.square() * (g * change).sum(1, keepdim=True)  # tr(D^T G_d D A_d)
        change = change * (s.clip / moved.clamp_min(TINY)).sqrt().clamp(max=1.0)
        return self.mean - self.lr * change, variance

    def _average(self) -> None:
        """Running means that weigh all batches alike at first, as Adam's do; those of a stopped replica stay."""
        rate, turn = self.settings.factor_rate, (int(self.count) - 1) // self.settings.factor_every + 1
        share = self.moves.to(self.mean) * (rate / (1 - (1 - rate) ** turn))
        self.squares.lerp_(self.grads[1], share)
        for layer in self.layers.values():
            for mean, new in zip((layer.a, layer.g), layer.batch, strict=True):
                mean.lerp_(new, share.view(-1, *[1] * (new.dim() - 1)))

    def state(self) -> list[Tensor]:
        return [self.squares, *(tensor for layer in self.layers.values() for tensor in layer.buffers())]

    def packed(self) -> Tensor:
        """[R, K, P]: all A and G, one after the other, then zeros."""
        flat = torch.cat([t.flatten(1) for layer in self.layers.values() for t in (layer.a, layer.g)], 1)
        size = self.mean.shape[1]
        rows: Tensor = F.pad(flat, (0, -flat.shape[1] % size)).unflatten(1, (-1, size))
        return rows


def unpacked(rows: Sequence[Tensor], known: Mapping[str, Block], layout: Layout) -> Factors:
    """The factors of these blocks, from the `packed` rows, [R, P] each."""
    sizes = [torch.Size(shape) for block in known.values() for shape in shapes(block, layout)]
    parts = torch.cat(list(rows), 1)[:, : sum(map(torch.Size.numel, sizes))].split([s.numel() for s in sizes], 1)
    each = iter([part.unflatten(1, size).clone() for part, size in zip(parts, sizes, strict=True)])
    return dict(zip(known, zip(each, each, strict=True), strict=True))


def of_block(block: Block, layout: Layout, prior: Tensor) -> Tensor:
    """[R, 1, 1, 1]: c^2 of a block; all its weights have the same prior."""
    return block.views(layout, prior, 1)[0][:, :1, :1].unsqueeze(3)


def pulls(memory: Memory, old: Mapping[str, Pair], prior: Tensor, round_: Round) -> list[Term]:
    """The part of beta/N KL(q || q_{t-1}) that holds the means."""
    layout, anchor = round_.network.layout, Gaussian(memory.anchor, None)
    known, each = blocks(round_.network, layout), memory.fisher / round_.n + prior
    pairs = {key: damped(a, g, of_block(known[key], layout, prior)) for key, (a, g) in old.items()}
    for key, (_, g) in pairs.items():
        for view in known[key].views(layout, each, g.shape[-1]):
            if view is not None:
                view.zero_()
    return [Elastic(anchor, each), *([Factored(anchor, pairs, known)] if pairs else [])]


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    network, n = round_.network, round_.n
    weight = tempering(s, round_) / n
    prior = weight * first_precision(round_, s).expand_as(memory.anchor)
    if not bool((prior > 0).all()):
        raise EvclError("tempering must be above 0: without a KL term, the variances have no optimum")
    old = {key: (a, g / n) for key, (a, g) in memory.factors.items()}
    made: list[NoisyKfacRule] = []

    def make(*args: Any) -> NoisyKfacRule:
        made.append(NoisyKfacRule(*args, network=network, old=old, prior=prior, weight=weight))
        return made[-1]

    part = network.layout.part(network.names_of(list(dict.fromkeys(task.head for task in round_.tasks))))
    known = blocks(network, part)
    numbers = sum(prod(shape) for block in known.values() for shape in shapes(block, part))
    each = (partial(lambda i: made[-1].packed()[:, i], i) for i in range(-(-numbers // part.size)))
    trackers = [AtEnd(lambda: made[-1].squares), *map(AtEnd, each)]
    terms = pulls(memory, old, prior, round_)
    fitted = yield Fit(round_.tasks, terms=terms, rule=make, trackers=trackers, capture=False)
    squares, *rows = (row for row in fitted.tracked if row is not None)
    factors = dict(memory.factors)
    if rows:
        own = [network.layout.gather(row, fitted.layout) for row in rows]
        for key, (a, g) in unpacked(own, known, fitted.layout).items():
            new = a.unsqueeze(1), n * g.unsqueeze(1)
            factors[key] = merged(factors[key], new, "nearest") if key in factors else new
    return Learned(fitted.q, Memory(fitted.q.mean, memory.fisher + n * squares, factors))


NOISY_KFAC = Method(
    name="noisy-kfac",
    only_classes="Kronecker factors are measured on class probabilities",
    bayesian=True,
    learn=learn,
    memory=Memory,
    settings={
        **WITHOUT,
        "momentum": None,
        # Chosen among tempering 0.005 to 1, lr 0.01 to 0.3 and clip 0.001 and 0.01, on held-out data of permuted-digits
        # and split-digits. Without the clip, lr 0.1 and tempering 0.02 diverge: the first factors are from one batch.
        "tempering": replace(BAYESIAN["tempering"], default=0.02),
        "lr": Setting(0.1, "learning rate of the natural-gradient step on the means", high=10.0, open_low=True),
        "clip": Setting(
            0.001,
            "maximum size of a step on the means: its quadratic form with the curvature, about twice the KL divergence "
            "between the predictions before and after it",
            high=1e6,
            open_low=True,
        ),
        "factor_rate": Setting(
            0.05, "fraction of the Kronecker factors that each new estimate replaces", high=1.0, open_low=True
        ),
        "factor_every": Setting(5, "number of steps between two estimates of the factors", low=1, high=1_000_000),
        "inverse_every": Setting(
            10, "number of steps between two computations of the covariance from the factors", low=1, high=1_000_000
        ),
    },
    apart=True,
    no_memory=NO_MEMORY,
)
