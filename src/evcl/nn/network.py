"""A network with Gaussian weights: a trunk made from the user's module, and heads on its output."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from evcl.errors import EvclError
from evcl.nn.layers import BayesianLayer, Grads, Linear, Weights
from evcl.nn.posterior import Gaussian, Layout


def he_uniform(shape: Sequence[int], fan_in: int, source: torch.Generator) -> Tensor:
    """U(-b, b) with b = sqrt(6 / fan_in), in float64 so that every precision starts from the same draw."""
    bound = math.sqrt(6 / max(1, fan_in))
    return torch.empty(tuple(shape), dtype=torch.float64).uniform_(-bound, bound, generator=source)


def head_names(k: int) -> dict[str, str]:
    """The names of head k's weights: with a blank, so that no module of a user's has them too."""
    return {"weight": f"head {k}.weight", "bias": f"head {k}.bias"}


class BayesianNetwork(nn.Module):
    """What `bayesianize` returns. Calling it runs the trunk: [R*B, ...] -> [R*B, features].

    `posterior` holds `mean` and `log_std`, both [R, P]; `layout` names its parts as the plain module names its
    parameters, with the heads' behind them: `head 0.weight`, `head 0.bias`, ...
    """

    def __init__(self, trunk: nn.Module, weights: Weights, layout: Layout, posterior: Gaussian) -> None:
        super().__init__()
        self.trunk = trunk
        self.weights = weights
        self.layout = layout
        self.posterior = posterior
        self.trunk_names = tuple(layout.shapes)
        self.heads = nn.ModuleList()
        self.bind(posterior.mean, posterior.variance(), layout)

    @property
    def replicas(self) -> int:
        return self.weights.replicas

    def bind(
        self,
        mean: Tensor,
        variance: Tensor | None,
        layout: Layout,
        grads: tuple[Tensor, Tensor | None] | None = None,
    ) -> list[Tensor]:
        """Compute with these flat buffers from now on; returns the parts that gradients are taken of.

        The means' parts come first, in the layout's order, then the variances'. They share memory with the buffers,
        so that an update in place is seen by the next forward pass. With `grads`, flat buffers too, a backward pass
        and then `collect_gradients` add the gradients to those.
        """
        self.weights.mean = _leaves(layout, mean)
        self.weights.variance = None if variance is None else _leaves(layout, variance)
        leaves = [*self.weights.mean.values(), *(self.weights.variance or {}).values()]
        self.weights.grads = None
        if grads is not None:
            self.weights.grads = Grads(layout.views(grads[0]), None if grads[1] is None else layout.views(grads[1]))
        return leaves

    def collect_gradients(self) -> None:
        """Bring the gradients that autograd left at the weights (of layers that know no better) to their place."""
        weights = self.weights
        assert weights.grads is not None
        both = ((weights.mean, weights.grads.mean, 1), (weights.variance, weights.grads.variance, 2))
        for leaves, views, scale in both:
            for name, leaf in (leaves or {}).items():
                if leaf.grad is not None and views is not None:
                    views[name].add_(leaf.grad, alpha=scale)
                    leaf.grad = None

    def forward(self, x: Tensor) -> Tensor:
        features = self.trunk(x)
        if not isinstance(features, Tensor) or features.dim() != 2 or features.shape[0] != x.shape[0]:
            came = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise EvclError(f"the network must turn {x.shape[0]} inputs into [{x.shape[0]}, features], not {came}")
        return features

    def logits(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        """The outputs of these heads side by side: [R*B, classes]."""
        features = self(x)
        outputs: list[Tensor] = [self.heads[k](features) for k in heads]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def names_of(self, heads: Sequence[int]) -> list[str]:
        """The trunk's names and these heads', their weights side by side and then their biases."""
        return [*self.trunk_names, *(head_names(k)[key] for key in ("weight", "bias") for k in heads)]

    def add_head(self) -> int:
        """A layer for one more head, and its number; `with_head` gives the layout with room for its weights."""
        k = len(self.heads)
        head = Linear(nn.Identity())
        head.names, head.weights = head_names(k), self.weights
        self.heads.append(head)
        return k

    def with_head(self, k: int, classes: int, features: int) -> Layout:
        """The layout in which head k has this many classes."""
        names = head_names(k)
        added = {names["weight"]: (classes, features), names["bias"]: (classes,)}
        return Layout({**self.layout.shapes, **added})

    def bayesian_layers(self) -> list[BayesianLayer]:
        return [m for m in self.modules() if isinstance(m, BayesianLayer)]


def _leaves(layout: Layout, flat: Tensor) -> dict[str, Tensor]:
    return {name: view.detach().requires_grad_() for name, view in layout.views(flat.detach()).items()}
