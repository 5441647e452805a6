"""What the outputs [..., o] of a head mean: a distribution over actions, or the values of actions.

Each is a likelihood, so that methods measure a policy as they measure any network: `fisher_targets` are scalars whose
per-example gradients, squared and summed, give the Fisher.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from evcl.targets import CATEGORICAL, Likelihood
from evcl.targets.likelihood import Estimate


class Policy(Likelihood):
    """How actions follow from the outputs of a head."""

    usual_tempering = 1.0

    def width(self, actions: int) -> int:
        """The number of outputs of a head."""
        return actions

    def act(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """The actions for outputs [B, o]; `noise` [B, D] as `noise` draws it."""
        raise NotImplementedError

    def noise(self, shape: Sequence[int], actions: int, source: torch.Generator) -> Tensor:
        """The random numbers [*shape, D] from which actions are made."""
        raise NotImplementedError

    def divergence(self, old: Tensor, new: Tensor) -> Tensor:
        """[...]: how far the new outputs are from the old ones; 0 if they are equal."""
        raise NotImplementedError

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """[...]: log pi(a|s)."""
        raise NotImplementedError

    def entropy(self, outputs: Tensor) -> Tensor:
        """[...]: that of pi(.|s)."""
        raise NotImplementedError

    def skip_labels(self, outputs: Tensor, generators: Sequence[torch.Generator] | None) -> None:
        """Nothing is drawn."""


class Discrete(Policy):
    """One of several actions: pi(a|s) = softmax(outputs)[a]."""

    name = "discrete policy"
    skip_labels = CATEGORICAL.skip_labels

    def noise(self, shape: Sequence[int], actions: int, source: torch.Generator) -> Tensor:
        return torch.rand(*shape, 1, generator=source)

    def act(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """The action at whose share of [0, 1] the uniform number is."""
        cumulative = outputs.softmax(1).cumsum(1)
        return (cumulative[:, :-1] <= noise).sum(1)

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        return outputs.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    def entropy(self, outputs: Tensor) -> Tensor:
        log_p = outputs.log_softmax(-1)
        return -(log_p.exp() * log_p).sum(-1)

    def divergence(self, old: Tensor, new: Tensor) -> Tensor:
        """KL(old || new)."""
        log_p = old.log_softmax(-1)
        return (log_p.exp() * (log_p - new.log_softmax(-1))).sum(-1)

    def fisher_targets(self, outputs: Tensor, y: Tensor, weights: Tensor, how: Estimate) -> list[Tensor]:
        """F = sum_a pi(a|s) (d log pi(a|s))^2: exact, over all actions."""
        return CATEGORICAL.fisher_targets(outputs, y, weights, how)


class Normal(Policy):
    """Numbers: pi(a|s) = prod_d N(a_d; mu_d, sigma_d^2). The outputs [..., 2 D] are mu and log sigma."""

    name = "normal policy"

    def width(self, actions: int) -> int:
        return 2 * actions

    def noise(self, shape: Sequence[int], actions: int, source: torch.Generator) -> Tensor:
        return torch.randn(*shape, actions, generator=source)

    def act(self, outputs: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = self._parts(outputs)
        return mean + log_std.exp() * noise

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        mean, log_std = self._parts(outputs)
        z = (actions - mean) * (-log_std).exp()
        return -(0.5 * z.square() + log_std + 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self, outputs: Tensor) -> Tensor:
        return (self._parts(outputs)[1] + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)

    def divergence(self, old: Tensor, new: Tensor) -> Tensor:
        """KL(old || new)."""
        (m0, s0), (m1, s1) = self._parts(old), self._parts(new)
        return (s1 - s0 + 0.5 * ((2 * s0).exp() + (m0 - m1).square()) * (-2 * s1).exp() - 0.5).sum(-1)

    def fisher_targets(self, outputs: Tensor, y: Tensor, weights: Tensor, how: Estimate) -> list[Tensor]:
        """F = sum_d (d mu_d)^2 / sigma_d^2 + 2 (d log sigma_d)^2: exact. Temperature has no meaning here."""
        mean, log_std = self._parts(outputs)
        root, sharp = weights.sqrt(), (-log_std).exp().detach()
        means = [(root * sharp[..., d] * mean[..., d]).sum() for d in range(mean.shape[-1])]
        return [*means, *((math.sqrt(2) * root * log_std[..., d]).sum() for d in range(mean.shape[-1]))]

    def _parts(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = outputs.chunk(2, -1)
        return mean, log_std.clamp(-5.0, 2.0)


class Values(Policy):
    """The values Q(s, a) of several actions, of which the best is taken. Their errors are N(0, 1)."""

    name = "action values"

    def noise(self, shape: Sequence[int], actions: int, source: torch.Generator) -> Tensor:
        return torch.zeros(*shape, 1)

    def act(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return outputs.argmax(1)

    def divergence(self, old: Tensor, new: Tensor) -> Tensor:
        return 0.5 * (old - new).square().sum(-1)

    def fisher_targets(self, outputs: Tensor, y: Tensor, weights: Tensor, how: Estimate) -> list[Tensor]:
        """F = sum_a (d Q_a)^2."""
        return [(weights.sqrt() * outputs[..., a]).sum() for a in range(outputs.shape[-1])]


DISCRETE, NORMAL, VALUES = Discrete(), Normal(), Values()
