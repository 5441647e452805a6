"""Weights without a specialised Bayesian layer: those of layers used unchanged, and parameters outside layers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from evcl._core.errors import EvclError, NoWeight
from evcl.nn.initial import he_std
from evcl.nn.layer import BayesianLayer, examples_at_once

Forward = Callable[[dict[str, Tensor], Tensor], Tensor]  # weights, a batch -> outputs


def gradients_by_example(run: Forward, weights: dict[str, Tensor], x: Tensor, delta: Tensor) -> dict[str, Tensor]:
    """[B, *shape] for each of the weights: the gradients of sum(run(weights, x_b) delta_b), example by example.

    By torch.func; if it does not know an operation of `run`, by a loop over the examples.
    """

    def one(weights: dict[str, Tensor], x: Tensor, delta: Tensor) -> dict[str, Tensor]:
        grads: dict[str, Tensor] = torch.func.vjp(lambda w: run(w, x.unsqueeze(0)).squeeze(0), weights)[1](delta)[0]
        return grads

    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():  # vmap knows this kernel only
        warnings.filterwarnings(
            "ignore", "There is a performance drop because we have not yet implemented the batching"
        )
        try:
            return torch.func.vmap(one, (None, 0, 0))(weights, x, delta)
        except (RuntimeError, ValueError, TypeError):
            pass
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
        rows = []
        for xb, db in zip(x.split(1), delta.split(1), strict=True):
            out = run(leaves, xb)
            rows.append(torch.autograd.grad(out, list(leaves.values()), db, materialize_grads=True, allow_unused=True))
    return {name: torch.stack(grads) for name, grads in zip(leaves, zip(*rows, strict=True), strict=True)}


class JointLayer(BayesianLayer):
    """A layer that computes the per-example gradients of all its parameters together. `places` are where its weights
    are put before its code runs: module, attribute, name of the parameter.
    """

    random = False
    places: list[tuple[nn.Module, str, str]]
    _sums: tuple[Tensor, Tensor, object, dict[str, Tensor]] | None = None  # of the last call of `sum_of`

    def drawn_once(self) -> list[dict[str, Tensor]]:
        """For each replica, one draw of all parameters."""
        drawn = {key: self.drawn(key, 1, shared=True) for key in self.names}
        return [{key: w[r, 0] for key, w in drawn.items() if w is not None} for r in range(self.weights.replicas)]

    def with_weights(self, weights: Mapping[str, Tensor], run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """run(x), with these weights in their places."""
        try:
            for owner, key, name in self.places:
                setattr(owner, key, weights[name])  # not in its __dict__: an nn.LSTM also notes its weights elsewhere
            return run(x)
        finally:
            for owner, key, _ in self.places:
                owner.__dict__.pop(key, None)

    def gradients(self, x: Tensor, delta: Tensor) -> Mapping[str, Tensor]:
        """[R, B, *shape] for each parameter: see `example_gradient`."""
        raise NotImplementedError

    def example_gradient(self, parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        return self.gradients(x, delta)[parameter]

    def rows_at_once(self, parameter: str, x: Tensor, delta: Tensor) -> int:
        whole = sum(prod(self.weights.mean[name].shape) for name in self.names.values())
        return examples_at_once(whole, x)

    def sum_of(self, of: Callable[[Tensor], Tensor], parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        """The sums of all parameters are computed when the first is asked for, and kept until all have been."""
        kept = self._sums
        if kept is None or kept[0] is not x or kept[1] is not delta or kept[2] is not of or parameter not in kept[3]:
            rows, sums = self.rows_at_once(parameter, x, delta), dict[str, Tensor]()
            for xs, ds in zip(x.split(rows, 1), delta.split(rows, 1), strict=True):
                for name, gradient in self.gradients(xs, ds).items():
                    total = of(gradient).sum(1)
                    sums[name] = sums[name] + total if name in sums else total
            kept = self._sums = (x, delta, of, sums)
        result = kept[3].pop(parameter)
        if not kept[3]:
            self._sums = None
        return result


class SampledLayer(JointLayer):
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
        self.places = [(part, key, keys[id(p)]) for part, key, p in inside if p is not None]
        for part, key, _ in self.places:
            del part._parameters[key]

    def forward(self, x: Tensor, *more: object, **options: object) -> Tensor:
        if more or options or not isinstance(x, Tensor):
            kind = type(self.layer).__name__
            raise EvclError(
                f"{self.path!r} ({kind}) is registered, so it takes one tensor and nothing else: "
                f"do not register {kind}; its weights are then drawn once per batch, whatever it takes and returns"
            )
        both = zip(self.drawn_once(), self.unfold(x), strict=True)
        return torch.cat([self._call(weights, part) for weights, part in both])

    def _call(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        out = self.with_weights(weights, self.layer, x)
        if not isinstance(out, Tensor):
            kind, came = type(self.layer).__name__, type(out).__name__
            raise EvclError(
                f"{self.path!r} ({kind}) returns a {came}, not a tensor: do not register {kind}, or register a "
                "Bayesian form for it"
            )
        return out

    def gradients(self, x: Tensor, delta: Tensor) -> dict[str, Tensor]:
        """Per-example gradients by torch.func."""
        means = [{key: self.weights.mean[name][r] for key, name in self.names.items()} for r in range(len(x))]
        each = zip(means, x.unbind(), delta.unbind(), strict=True)
        grads = [gradients_by_example(self._call, *one) for one in each]
        return {key: torch.stack([one[key] for one in grads]) for key in self.names}


class FreeParameter(BayesianLayer):
    """A parameter [1, ...] outside a layer that the batch shares, such as a class token or a position embedding.

    It is called with the network's input before each forward pass, and its result [R*B, ...] replaces the parameter:
    one value per example. In training, each example has its own draw.
    """

    random = False

    def __init__(self, owner: nn.Module, key: str) -> None:
        super().__init__(nn.Identity())
        self.own = {key: owner._parameters[key]}  # type: ignore[dict-item]
        self.key = key

    def forward(self, x: Tensor) -> Tensor:
        examples = x.shape[0] // self.weights.replicas
        value = self.drawn(self.key, examples)
        assert value is not None
        return value.expand(-1, examples, *value.shape[2:]).flatten(0, 2)

    def example_gradient(self, parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        return delta.unsqueeze(2)


class DirectParameters(JointLayer):
    """Parameters of any shape that a network's own code uses directly, such as the weight of an `F.linear`.

    Before the trunk runs, each is drawn once per batch and put where the code looks for it. A parameter has one value
    per replica, which code that sees the replicas as one batch cannot use: so the trunk runs once per replica. The
    Fisher of these parameters is computed by torch.func through the whole trunk.

    Their role is unknown, so means start from the module's values. A parameter with several numbers per unit (the rows
    of a matrix) has a prior centred on 0; the prior of any other (a scale, a bias, a temperature) is centred on its
    initial values.
    """

    run: Callable[[Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.places = []

    def add(self, owner: nn.Module, key: str, name: str) -> None:
        """Fill the attribute `key` of a module with the parameter `name` in every forward pass."""
        self.names[name] = name
        self.places.append((owner, key, name))
        owner._parameters.pop(key, None)

    def scale(self, parameter: str) -> float:
        value = self.own[parameter].detach()
        size = float(value.square().mean().sqrt()) if value.numel() else 0.0
        if _per_unit(value) == 1:
            return 0.25 * max(1.0, size)  # as the scale of a norm
        return max(he_std(_per_unit(value)), size)

    def centre(self, parameter: str) -> Tensor:
        value = self.own[parameter]
        return value.detach().clone() if _per_unit(value) == 1 else torch.zeros_like(value)

    def forward(self, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        self.run = run
        each = self.drawn_once()
        if len(each) == 1:
            return self.with_weights(each[0], run, x)
        outputs = []
        for r, part in enumerate(self.unfold(x)):
            with self.weights.one(r):
                outputs.append(self.with_weights(each[r], run, part))
        return torch.cat(outputs)

    def gradients(self, x: Tensor, delta: Tensor) -> dict[str, Tensor]:
        grads = []
        for r, (xs, ds) in enumerate(zip(x, delta, strict=True)):
            with self.weights.one(r):
                self.weights.batch, self.weights.mapped = 1, True
                values = {key: self.weights.mean[name][0].detach() for key, name in self.names.items()}
                grads.append(gradients_by_example(lambda w, one: self.with_weights(w, self.run, one), values, xs, ds))
        return {key: torch.stack([one[key] for one in grads]) for key in self.names}


def _per_unit(value: Tensor) -> int:
    return prod(value.shape[1:])


class Plain(NamedTuple):
    """A plain layer without its parameters, and where they belong: module, attribute, name of the parameter."""

    layer: nn.Module
    places: list[tuple[nn.Module, str, str]]


class Composite(nn.Module):
    """A Bayesian form that consists of Bayesian layers. It has no weights to use directly either."""

    def __getattr__(self, name: str) -> Any:
        plain = vars(self).get("plain")
        if plain is not None and any(part is plain.layer and key == name for part, key, _ in plain.places):
            raise NoWeight(self, name)
        return super().__getattr__(name)


class SecondAxis(nn.Module):
    """A layer whose input has the batch as its second axis: [t, R*B, ...]."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.transpose(0, 1))
        return out.transpose(0, 1)
