"""A posterior as a user looks at it: by the names of the weights, without replicas, read-only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from zlib import crc32

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl.posterior.gaussian import Gaussian
from evcl.posterior.kronecker import KroneckerGaussian


@dataclass(frozen=True)
class WeightPosterior:
    """What is believed about the weights of one name. Tensors are copies, of the weights' shape."""

    own: Gaussian
    first: Gaussian
    drawn: Callable[[int, int], Tensor] | None = None  # (count, seed) -> draws, where weights depend on each other

    @property
    def mean(self) -> Tensor:
        return self.own.mean.clone()

    @property
    def std(self) -> Tensor:
        return self.own.std()

    @property
    def precision(self) -> Tensor:
        """1 / variance of each weight."""
        return self.own.precision()

    def draw(self, count: int, seed: int = 0) -> Tensor:
        """[count, *shape]: draws of the weights, a function of the seed."""
        if count < 1:
            raise EvclError(f"the number of draws must be at least 1, not {count}")
        if self.drawn is not None:
            return self.drawn(count, seed)
        source = torch.Generator().manual_seed(seed)
        z = torch.randn(count, *self.own.mean.shape, generator=source, dtype=torch.float64)
        return self.own.draw(z.to(self.own.mean))

    def log_density(self, weights: Tensor) -> Tensor:
        """[...]: the log density of weights [..., *shape], in nats."""
        std = self.std
        each = -0.5 * ((weights - self.own.mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)
        return each.flatten(weights.dim() - std.dim()).sum(-1)

    def kl(self) -> float:
        """The KL divergence from the first prior, in nats: how much was learned about these weights."""
        return float(self.own.divergence(self.first).sum())


@dataclass(frozen=True)
class NamedPosterior(Mapping[str, WeightPosterior]):
    """The posterior over all weights of a network: a mapping from their names. It does not change when the learner
    learns on.
    """

    own: Gaussian
    first: Gaussian
    matrix: KroneckerGaussian | None = None  # `own` has its marginals

    def __getitem__(self, name: str) -> WeightPosterior:
        layout = self.own.layout
        assert layout is not None
        if name not in layout.shapes:
            raise EvclError(f"there are no weights {name!r}; there are {', '.join(map(repr, layout.shapes))}")
        own, first = (q.map(lambda flat: layout.view(flat, name)[0]) for q in (self.own, self.first))
        if self.matrix is None:
            return WeightPosterior(own, first)
        return WeightPosterior(own, first, lambda count, seed: self.draw(count, seed)[name])

    def __iter__(self) -> Iterator[str]:
        return iter(() if self.own.layout is None else self.own.layout.shapes)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def draw(self, count: int, seed: int = 0) -> dict[str, Tensor]:
        """[count, *shape] by name: draws of all weights, a function of the seed."""
        if self.matrix is None:
            return {name: one.draw(count, seed=crc32(f"{seed} {name}".encode())) for name, one in self.items()}
        source, mean = torch.Generator().manual_seed(seed), self.matrix.mean
        each = [torch.randn(mean.shape, generator=source, dtype=torch.float64).to(mean) for _ in range(count)]
        return self.matrix.layout.views(torch.cat([self.matrix.draw(z) for z in each]))

    def log_density(self, weights: Mapping[str, Tensor]) -> Tensor:
        """[...]: the log density of all weights, [..., *shape] by name, in nats."""
        if self.matrix is None:
            return torch.stack([one.log_density(weights[name]) for name, one in self.items()]).sum(0)
        extra = next(weights[name].shape[: weights[name].dim() - one.own.mean.dim()] for name, one in self.items())
        flat = torch.cat([weights[name].reshape(*extra, -1) for name in self], -1)
        each = [self.matrix.log_density(one.unsqueeze(0))[0] for one in flat.view(-1, flat.shape[-1])]
        return torch.stack(each).view(extra)

    def kl(self) -> float:
        """The KL divergence of all weights from the first prior, in nats."""
        if self.matrix is None:
            return sum(one.kl() for one in self.values())
        factors = {key: (a[:, :1], g[:, :1]) for key, (a, g) in self.matrix.factors.items()}  # of the first prior
        rest = self.first.precision() * (self.matrix.rest > 0)
        return float(self.matrix.kl(replace(self.matrix, mean=self.first.mean, factors=factors, rest=rest)))
