"""Weights without a specialised Bayesian layer: those of layers used unchanged, and parameters outside layers."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from evcl._core.errors import EvclError
from evcl.nn.layer import BayesianLayer


class SampledLayer(BayesianLayer):
    """Wraps any layer that maps one tensor to another, example by example; `evcl.nn.register(MyLayer)` selects it.

    The layer's own forward runs once per replica, with weights drawn once per batch. This is correct for every layer,
    but gradients have more variance than with a specialised form. Means start from the module's weights.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.own = dict(layer.named_parameters())
        self.layer = copy.deepcopy(layer)
        keys = {id(p): name for name, p in self.layer.named_parameters()}
        inside = [(part, key, p) for part in self.layer.modules() for key, p in part._parameters.items()]
        self.places = [
            (part, key, keys[id(p)]) for part, key, p in inside if p is not None
        ]  # filled for each forward pass
        for part, key, _ in self.places:
            del part._parameters[key]

    def initial(self, parameter: str, source: torch.Generator) -> Tensor:
        return self.own[parameter].detach()

    def redrawn(self, mean: Tensor, scale: float, source: torch.Generator) -> Tensor:
        return mean

    def forward(self, x: Tensor) -> Tensor:
        drawn = {key: self.drawn(key, 1, shared=True) for key in self.names}
        rows = [{key: w[r, 0] for key, w in drawn.items() if w is not None} for r in range(self.weights.replicas)]
        return torch.cat([self._call(weights, part) for weights, part in zip(rows, self.unfold(x), strict=True)])

    def _call(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        try:
            for part, key, name in self.places:
                setattr(part, key, weights[name])
            out = self.layer(x)
        finally:
            for part, key, _ in self.places:
                part.__dict__.pop(key, None)
        if not isinstance(out, Tensor):
            kind, came = type(self.layer).__name__, type(out).__name__
            raise EvclError(f"{self.path!r} ({kind}) returns a {came}, not a tensor: register a Bayesian form for it")
        return out

    def example_gradient(self, parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        """Per-example gradients by torch.func."""

        def one(weights: dict[str, Tensor], x: Tensor, delta: Tensor) -> Tensor:
            def out(weight: Tensor) -> Tensor:
                return self._call({**weights, parameter: weight}, x.unsqueeze(0)).squeeze(0)

            gradient: Tensor = torch.func.vjp(out, weights[parameter])[1](delta)[0]
            return gradient

        examples = torch.func.vmap(one, (None, 0, 0))
        means = [{key: self.weights.mean[name][r] for key, name in self.names.items()} for r in range(len(x))]
        return torch.stack([examples(*each) for each in zip(means, x, delta, strict=True)])


class FreeParameter(BayesianLayer):
    """A parameter [1, ...] outside a layer that the batch shares, such as a class token or a position embedding.

    It is called with the network's input before each forward pass, and its result [R*B, ...] replaces the parameter:
    one value per example. In training, each example has its own draw.
    """

    def __init__(self, owner: nn.Module, key: str) -> None:
        super().__init__(nn.Identity())
        self.own = {key: owner._parameters[key]}  # type: ignore[dict-item]
        self.key = key

    def initial(self, parameter: str, source: torch.Generator) -> Tensor:
        return self.own[parameter].detach()

    def redrawn(self, mean: Tensor, scale: float, source: torch.Generator) -> Tensor:
        return mean

    def forward(self, x: Tensor) -> Tensor:
        examples = x.shape[0] // self.weights.replicas
        value = self.drawn(self.key, examples)
        assert value is not None
        return value.expand(-1, examples, *value.shape[2:]).flatten(0, 2)

    def example_gradient(self, parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        return delta.unsqueeze(2)
