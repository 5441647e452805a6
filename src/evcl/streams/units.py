"""A covariance with one block for each unit of a perceptron: its weights depend on each other, but not on those of
other units (the node-decoupled extended Kalman filter: Puskorius & Feldkamp, 1994).

A unit h with inputs x_n [size] has the derivatives d_nkh x_n, d of output k by the unit's sum. With its covariance S_h,

    V_nk,ml = sum_h d_nkh d_mlh x_n' S_h x_m

so that J [n, K, P] is never made. An output is a unit, too, with d = 1 for itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from evcl.streams.filters import TensorFilter, inflate, rooted
from evcl.streams.jacobian import Perceptron


class Layer:
    """The rows as the units of a layer see them: their inputs [R, n, size], d [R, n, K, units], and x S_h [R, units, n,
    size].
    """

    def __init__(self, inputs: Tensor, delta: Tensor, covariance: Tensor) -> None:
        self.inputs, self.delta = inputs, delta
        self.spread = inputs.unsqueeze(1) @ covariance

    def variance(self) -> Tensor:
        """[R, n, K, n, K]"""
        kernel = self.spread @ self.inputs.unsqueeze(1).mT  # [R, units, n, n]
        r, n, k, units = self.delta.shape
        if k == 1:
            d = self.delta.view(r, n, units).mT
            return (d.unsqueeze(3) * kernel * d.unsqueeze(2)).sum(1).view(r, n, 1, n, 1)
        left = self.delta.unsqueeze(1) * kernel.permute(0, 3, 2, 1).unsqueeze(3)  # [R, m, n, K, units]
        found = left.flatten(2, 3) @ self.delta.mT  # [R, m, n K, K]
        return found.view(r, n, n, k, k).permute(0, 2, 3, 1, 4)

    def along(self, a: Tensor) -> Tensor:
        """[R, units * size]"""
        pulled = (self.delta * a.unsqueeze(3)).sum(2).mT  # [R, units, n]
        return (pulled.unsqueeze(2) @ self.spread).flatten(1)

    def change(self, weights: Tensor) -> Tensor:
        sums = self.inputs @ weights.view(len(weights), -1, self.inputs.shape[2]).mT  # [R, n, units]
        return (self.delta @ sums.unsqueeze(3)).squeeze(3)

    def shrink(self, covariance: Tensor, known: Tensor) -> None:
        """S_h - S_h x' (d' known d) x S_h, for known [R, n, K, n, K]."""
        r, n, k, units = self.delta.shape
        half = known.reshape(r, n * k, n, k).transpose(1, 2) @ self.delta  # [R, m, n K, units]
        each = (half.view(r, n, n, k, units) * self.delta.unsqueeze(1)).sum(3)  # [R, m, n, units]
        reduce(covariance, self.spread, each.permute(0, 3, 1, 2))


class Outputs(Layer):
    """The layer of K outputs, where d is 1 for an output itself and 0 for the others."""

    def __init__(self, inputs: Tensor, covariance: Tensor) -> None:
        self.inputs = inputs
        self.spread = inputs.unsqueeze(1) @ covariance

    def add_to(self, variance: Tensor) -> None:
        kernel = self.spread @ self.inputs.unsqueeze(1).mT
        variance.diagonal(dim1=2, dim2=4).add_(kernel.permute(0, 2, 3, 1))

    def along(self, a: Tensor) -> Tensor:
        return (a.mT.unsqueeze(2) @ self.spread).flatten(1)

    def change(self, weights: Tensor) -> Tensor:
        return self.inputs @ weights.view(len(weights), -1, self.inputs.shape[2]).mT

    def shrink(self, covariance: Tensor, known: Tensor) -> None:
        reduce(covariance, self.spread, known.diagonal(dim1=2, dim2=4).permute(0, 3, 1, 2))


def reduce(covariance: Tensor, spread: Tensor, known: Tensor) -> None:
    """covariance [R, units, size, size] - spread' known spread, in place; spread [R, units, n, size]."""
    if spread.shape[2] == 1:  # a single row: known is a number per unit, and its root keeps the covariance symmetric
        half = (known.clamp_min(0).sqrt() * spread).flatten(0, 1)
        covariance.flatten(0, 1).baddbmm_(half.mT, half, alpha=-1)
        return
    less = spread.mT @ (known @ spread)
    covariance -= 0.5 * (less + less.mT)  # rounding must not make it lopsided


class Layers:
    """The reach of rows through the units of all layers."""

    def __init__(self, hidden: list[Layer], outputs: Outputs) -> None:
        self.every: list[Layer] = [*hidden, outputs]
        r, k, n, _ = outputs.spread.shape
        total = outputs.inputs.new_zeros(r, n, k, n, k)
        for layer in hidden:
            total += layer.variance()
        outputs.add_to(total)
        self.variance = total.view(r, n * k, n * k)

    def along(self, a: Tensor) -> Tensor:
        return torch.cat([layer.along(a) for layer in self.every], 1)

    def change(self, weights: Tensor) -> Tensor:
        sizes = [layer.spread.shape[1] * layer.spread.shape[3] for layer in self.every]
        parts = zip(self.every, weights.split(sizes, 1), strict=True)
        return torch.stack([layer.change(part) for layer, part in parts]).sum(0)


class Units(TensorFilter):
    """`blocks` [R, units, size, size]: the covariance of each unit's weights, for each hidden layer and the outputs."""

    network: Perceptron

    def __init__(self, network: Perceptron, mean: Tensor, prior: Tensor) -> None:
        self.network, self.mean, self.prior = network, mean.clone(), prior.clone()
        self.blocks = [torch.diag_embed(own).expand(len(mean), -1, -1, -1).clone() for own in self._own(prior)]

    def _own(self, weights: Tensor) -> list[Tensor]:
        """The weights [P] of each layer, as [units, size]."""
        groups = [*self.network.groups, (len(self.network.start), -1, len(self.network.row))]
        found = []
        for start, units, size in groups:
            end = None if units < 0 else start + units * size
            found.append(weights[start:end].view(-1, size))
        return found

    def look(self, weights: Tensor, x: Tensor) -> tuple[Tensor, Layers]:  # type: ignore[override]
        f, hidden, last = self.network.backward(weights, x)
        layers = [Layer(a, delta, block) for (a, delta), block in zip(hidden, self.blocks, strict=False)]
        return f, Layers(layers, Outputs(last, self.blocks[-1]))

    def shrink(self, found: Layers, b: Tensor, factor: Tensor) -> None:
        r, n, k, _ = b.shape
        half = rooted(b.mT, torch.cholesky_inverse(factor))
        known = rooted(b.mT, half.mT).view(r, n, k, n, k)  # B (I + B' V B)^-1 B'
        for layer, block in zip(found.every, self.blocks, strict=True):
            layer.shrink(block, known)

    def forget(self, kept: Tensor) -> None:
        for own, block in zip(self._own(self.prior), self.blocks, strict=True):
            inflate(block, own, kept)

    def grow(self, mean: Tensor, prior: Tensor) -> None:
        self.widen(mean, prior)
        new = torch.diag_embed(prior).expand(len(self.mean), 1, -1, -1)
        self.blocks[-1] = torch.cat([self.blocks[-1], new], 1)

    def reset(self, targets: Tensor, mean: Tensor) -> None:
        self.mean[targets] = mean
        for own, block in zip(self._own(self.prior), self.blocks, strict=True):
            block[targets] = torch.diag_embed(own)

    def state(self) -> dict[str, Tensor]:
        return {"mean": self.mean, **{f"block {i}": block for i, block in enumerate(self.blocks)}}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.mean = state["mean"].clone()
        self.blocks = [state[f"block {i}"].clone() for i in range(len(self.blocks))]
