"""Networks as functions of one flat vector of weights, with the derivative of their outputs by every weight.

The weights [R, P] of R networks are those of the layers, then one row [features + 1] for each of K outputs, the bias
last; a further output appends its row. `Perceptron` computes the derivatives by hand; `Module` by `torch.func`, for any
network.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from evcl._core.errors import EvclError
from evcl._core.randomness import Purpose, generator
from evcl.nn import MLP
from evcl.streams.arrays import Array, transposed

HIDDEN_PRIOR, OUTPUT_PRIOR, BIAS_PRIOR = 4.0, 16.0, 4.0  # variances; those of weights are times the fan-in


class Network(Protocol):
    """`start` [p] and `prior` [p]: the means and variances of the weights below the outputs, before any row; `row`
    [features + 1]: the variances of the weights of one output.
    """

    start: Array
    prior: Array
    row: Array

    def jacobian(self, weights: Array, x: Array) -> tuple[Array, Array]:
        """The outputs [R, n, K] for inputs x [n, ...], and their derivatives [R, n, K, P]."""
        ...


class Perceptron:
    """Linear layers with an activation, tanh or relu. Outputs see the last hidden layer and, with `skip`, the inputs.

    Without hidden layers, this is a linear model.
    """

    def __init__(self, widths: Sequence[int], activation: str, skip: bool, start: Array) -> None:
        self.widths, self.activation, self.skip, self.start = list(widths), activation, skip, start
        self.groups: list[tuple[int, int, int]] = []  # of each hidden layer: its first weight, units, weights per unit
        variances, place = [], 0
        for fan_in, units in pairwise(widths):
            self.groups.append((place, units, fan_in + 1))
            place += units * (fan_in + 1)
            own = np.full((units, fan_in + 1), HIDDEN_PRIOR / fan_in)
            own[:, -1] = BIAS_PRIOR / 4
            variances.append(own.flatten())
        self.prior = np.concatenate(variances) if variances else np.empty(0)
        inputs, last = widths[0], widths[-1]
        parts = [np.full(last, OUTPUT_PRIOR / last)] if len(widths) > 1 else []
        if skip or len(widths) == 1:
            parts.append(np.full(inputs, HIDDEN_PRIOR / inputs))
        self.row = np.concatenate([*parts, np.full(1, BIAS_PRIOR)])

    def backward(self, weights: Array, x: Array) -> tuple[Array, list[tuple[Array, Array]], Array]:
        """The outputs [R, n, K]. For each hidden layer, the inputs of its units [R, n, size], the last of which is 1,
        and the derivatives [R, n, K, units] of the outputs by the units' sums. And the inputs of the outputs.
        """
        r, n = len(weights), len(x)
        inputs = np.empty((r, n, self.widths[0] + 1))
        inputs[..., :-1], inputs[..., -1] = x.reshape(n, -1), 1
        layer_inputs, slopes, a = [], [], inputs
        layers = [weights[:, at : at + units * size].reshape(r, units, size) for at, units, size in self.groups]
        for i, layer in enumerate(layers):
            layer_inputs.append(a)
            z, slope = self.activated(a @ transposed(layer))
            slopes.append(slope)
            skips = self.skip and i == len(layers) - 1
            a = np.concatenate([z, inputs if skips else inputs[..., -1:]], 2)
        rows = weights[:, len(self.start) :].reshape(r, -1, len(self.row))
        deltas, back = [], rows[:, None]  # [R, n, K, units]
        for i in range(len(layers) - 1, -1, -1):
            deltas.append(back[..., : layers[i].shape[1]] * slopes[i][:, :, None])
            if i:
                back = deltas[-1] @ layers[i][:, None]
        return a @ transposed(rows), list(zip(layer_inputs, deltas[::-1], strict=True)), a

    def activated(self, z: Array) -> tuple[Array, Array]:
        """The activation of sums z, and its derivative."""
        if self.activation == "relu":
            return np.maximum(z, 0), (z > 0).astype(np.float64)
        h = np.tanh(z)
        return h, 1 - h * h

    def jacobian(self, weights: Array, x: Array) -> tuple[Array, Array]:
        f, layers, a = self.backward(weights, x)
        return f, self.dense(f.shape[2], layers, a)

    def dense(self, k: int, layers: list[tuple[Array, Array]], a: Array) -> Array:
        """J [R, n, K, P], from what `backward` returns."""
        r, n, size = a.shape
        first = len(self.start)
        jacobian = np.zeros((r, n, k, first + k * size))
        for (start, units, width), (inputs, delta) in zip(self.groups, layers, strict=True):
            own = jacobian[..., start : start + units * width].reshape(r, n, k, units, width)  # a view
            np.multiply(delta[..., None], inputs[:, :, None, None], out=own)
        for output in range(k):
            place = first + output * size
            jacobian[:, :, output, place : place + size] = a
        return jacobian

    def times(self, layers: list[tuple[Array, Array]], a: Array, scale: Array, matrices: Array) -> Array:
        """[R, K, P]: J D C for a single row, the diagonal D, `scale` [R, P], and C [R, P, P], without J: one product
        for each unit and output, rather than one with all of C for each output.
        """
        r, _, size = a.shape
        first, last = len(self.start), matrices.shape[2]
        own = a[:, None] * scale[:, first:].reshape(r, -1, 1, size)
        product = (own @ matrices[:, first:].reshape(r, -1, size, last))[:, :, 0]
        for (start, units, width), (inputs, delta) in zip(self.groups, layers, strict=True):
            place = slice(start, start + units * width)
            own = inputs[:, None] * scale[:, place].reshape(r, units, 1, width)
            product += delta[:, 0] @ (own @ matrices[:, place].reshape(r, units, width, last))[:, :, 0]
        return product


class Module:
    """Any torch network whose examples do not affect each other; its outputs are features, on which the rows of the
    outputs are linear. It is evaluated as in `eval()`.
    """

    def __init__(self, network: nn.Module, x: Tensor) -> None:
        self.network = network = copy.deepcopy(network).double().eval()
        self.shapes = {name: p.shape for name, p in network.named_parameters() if p.requires_grad}
        own = dict(network.named_parameters())
        self.start = torch.cat([own[name].detach().flatten() for name in self.shapes] or [x.new_empty(0)]).numpy()
        fans = [math.prod(shape[1:]) if len(shape) > 1 else 0 for shape in self.shapes.values()]
        each = [
            np.full(shape.numel(), HIDDEN_PRIOR / f if f else BIAS_PRIOR / 16)
            for f, shape in zip(fans, self.shapes.values(), strict=True)
        ]
        self.prior = np.concatenate(each or [np.empty(0)])
        try:
            with torch.no_grad():
                features = self.network(x)
        except (RuntimeError, ValueError, TypeError) as error:
            raise EvclError(f"the network cannot take inputs of shape {tuple(x.shape)}: {error}") from None
        if not isinstance(features, Tensor) or len(features) != len(x):
            raise EvclError("the network must return one tensor [n, ...] with the features of n rows")
        count = features[0].numel()
        self.row = np.concatenate([np.full(count, OUTPUT_PRIOR / count), np.full(1, BIAS_PRIOR)])

    @torch.inference_mode()
    def jacobian(self, weights: Array, x: Array) -> tuple[Array, Array]:
        def outputs(flat: Tensor, one: Tensor) -> Any:
            places, parts = 0, {}
            for name, shape in self.shapes.items():
                parts[name] = flat[places : places + shape.numel()].view(shape)
                places += shape.numel()
            features = functional_call(self.network, parts, (one.unsqueeze(0),)).flatten()
            rows = flat[places:].view(-1, len(self.row))
            f = rows[:, :-1] @ features + rows[:, -1]
            return f, f

        each = vmap(jacrev(outputs, has_aux=True), in_dims=(None, 0))
        jacobian, f = vmap(each, in_dims=(0, None))(torch.from_numpy(weights), torch.from_numpy(x))
        return f.numpy(), jacobian.numpy()


def default(inputs: int, hidden: int, seed: int) -> Perceptron:
    """One hidden layer of tanh units beside a linear part. Half of the units look at one or two inputs alone, so that
    rules on single columns need not be found among all of them.
    """
    if not hidden:
        return Perceptron([inputs], "tanh", True, np.empty(0))
    source = generator(seed, Purpose.STREAM)
    w = GAIN * torch.randn(hidden, inputs, generator=source, dtype=torch.float64) / math.sqrt(inputs)
    for unit in range(hidden // 2):
        some = torch.randperm(inputs, generator=source)[: 1 + unit % 2]
        alone = torch.zeros(inputs, dtype=torch.float64)
        alone[some] = torch.randn(len(some), generator=source, dtype=torch.float64) / math.sqrt(len(some))
        w[unit] = SPARSE_FACTOR * GAIN * alone
    b = 0.7 * GAIN * torch.randn(hidden, 1, generator=source, dtype=torch.float64)
    return Perceptron([inputs, hidden], "tanh", True, torch.cat([w, b], 1).flatten().numpy())


SPARSE_FACTOR = 2.5  # how much larger it is where a unit looks at few inputs
GAIN = 1.5  # the deviation of a hidden unit's input, for inputs of mean 0 and deviation 1


def of(network: nn.Module, x: Tensor) -> Network:
    """The network as a function of its weights, for inputs like x [n, ...]; fast if it is an `evcl.nn.mlp`."""
    if type(network) is not MLP:
        return Module(network, x)
    if (width := x[0].numel()) != network.inputs:
        raise EvclError(f"the network takes {network.inputs} numbers per row, not {width}")
    layers = [layer for layer in network if isinstance(layer, nn.Linear)]
    parts = [torch.cat([one.weight, one.bias.unsqueeze(1)], 1).detach().double().flatten() for one in layers]
    start = torch.cat(parts).numpy() if parts else np.empty(0)
    return Perceptron([network.inputs, *network.hidden], "relu", False, start)
