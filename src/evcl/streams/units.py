"""A covariance with one block for each unit of a perceptron: its weights depend on each other, but not on those of
other units (the node-decoupled extended Kalman filter: Puskorius & Feldkamp, 1994).

A unit h with inputs x_n [size] has the derivatives d_nkh x_n, d of output k by the unit's sum. With its covariance S_h,

    V_nk,ml = sum_h d_nkh d_mlh x_n' S_h x_m

so that J [n, K, P] is never made. An output is a unit, too, with d = 1 for itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from evcl.streams.arrays import Array, diagonal_matrices, less_squares, total, transposed
from evcl.streams.filters import Filter, Full, inflate, rooted
from evcl.streams.jacobian import Perceptron


class Layer:
    """The rows as the units of a layer see them: their inputs [R, n, size], d [R, n, K, units], and x S_h [R, units, n,
    size].
    """

    def __init__(self, inputs: Array, delta: Array, covariance: Array) -> None:
        self.inputs, self.delta = inputs, delta
        self.spread = inputs[:, None] @ covariance

    def variance(self) -> Array:
        """[R, n, K, n, K]"""
        kernel = self.spread @ transposed(self.inputs)[:, None]  # [R, units, n, n]
        r, n, k, units = self.delta.shape
        if k == 1:
            d = transposed(self.delta[:, :, 0])
            return total(d[..., None] * kernel * d[:, :, None], 1).reshape(r, n, 1, n, 1)
        left = self.delta[:, None] * kernel.transpose(0, 3, 2, 1)[:, :, :, None]  # [R, m, n, K, units]
        variance = left.reshape(r, n, n * k, units) @ transposed(self.delta)  # [R, m, n K, K]
        return variance.reshape(r, n, n, k, k).transpose(0, 2, 3, 1, 4)

    def along(self, a: Array) -> Array:
        """[R, units * size]"""
        pulled = transposed(total(self.delta * a[..., None], 2))  # [R, units, n]
        return (pulled[:, :, None] @ self.spread).reshape(len(a), -1)

    def change(self, weights: Array) -> Array:
        sums = self.inputs @ transposed(weights.reshape(len(weights), -1, self.inputs.shape[2]))  # [R, n, units]
        return (self.delta @ sums[..., None])[..., 0]

    def shrink(self, covariance: Array, known: Array) -> None:
        """S_h - S_h x' (d' known d) x S_h, for known [R, n, K, n, K]."""
        r, n, k, units = self.delta.shape
        half = known.reshape(r, n * k, n, k).swapaxes(1, 2) @ self.delta  # [R, m, n K, units]
        each = total(half.reshape(r, n, n, k, units) * self.delta[:, None], 3)  # [R, m, n, units]
        reduce(covariance, self.spread, each.transpose(0, 3, 1, 2))


class Outputs(Layer):
    """The layer of K outputs, where d is 1 for an output itself and 0 for the others."""

    def __init__(self, inputs: Array, covariance: Array) -> None:
        self.inputs = inputs
        self.spread = inputs[:, None] @ covariance

    def add_to(self, variance: Array) -> None:
        kernel = self.spread @ transposed(self.inputs)[:, None]  # [R, K, n, n]
        own_outputs(variance)[...] += kernel

    def along(self, a: Array) -> Array:
        return (transposed(a)[:, :, None] @ self.spread).reshape(len(a), -1)

    def change(self, weights: Array) -> Array:
        return self.inputs @ transposed(weights.reshape(len(weights), -1, self.inputs.shape[2]))

    def shrink(self, covariance: Array, known: Array) -> None:
        reduce(covariance, self.spread, own_outputs(known))


def own_outputs(a: Array) -> Array:
    """[R, K, n, m]: what is between an output and itself in a [R, n, K, m, K], which can be written to."""
    blocks = a.diagonal(0, 2, 4).transpose(0, 3, 1, 2)
    blocks.flags.writeable = True
    return blocks


def reduce(covariance: Array, spread: Array, known: Array) -> None:
    """covariance [R, units, size, size] - spread' known spread, in place; spread [R, units, n, size]."""
    if spread.shape[2] == 1:  # a single row: known is a number per unit, and its root keeps the covariance symmetric
        half = np.sqrt(np.maximum(known, 0)) * spread
        size = half.shape[3]
        less_squares(covariance.reshape(-1, size, size), half.reshape(-1, 1, size))
        return
    less = transposed(spread) @ (known @ spread)
    covariance -= 0.5 * (less + transposed(less))  # rounding must not make it lopsided


class Layers:
    """The reach of rows through the units of all layers."""

    def __init__(self, hidden: list[Layer], outputs: Outputs) -> None:
        self.every: list[Layer] = [*hidden, outputs]
        r, k, n, _ = outputs.spread.shape
        variance = np.zeros((r, n, k, n, k))
        for layer in hidden:
            variance += layer.variance()
        outputs.add_to(variance)
        self.variance = variance.reshape(r, n * k, n * k)

    def along(self, a: Array) -> Array:
        return np.concatenate([layer.along(a) for layer in self.every], 1)

    def change(self, weights: Array) -> Array:
        ends = np.cumsum([layer.spread.shape[1] * layer.spread.shape[3] for layer in self.every])
        parts = zip(self.every, np.split(weights, ends[:-1], 1), strict=True)
        return total(np.stack([layer.change(part) for layer, part in parts]), 0)


class Units(Filter):
    """`blocks` [R, units, size, size]: the covariance of each unit's weights, for each hidden layer and the outputs."""

    network: Perceptron

    def __init__(self, network: Perceptron, mean: Array, prior: Array) -> None:
        super().__init__(network, mean, prior)
        self.blocks = [np.stack([diagonal_matrices(own)] * len(mean)) for own in self._own(prior)]

    @classmethod
    def of_full(cls, full: Full) -> Units:
        """The same weights, without what those of different units have to do with each other."""
        assert isinstance(full.network, Perceptron)
        result = cls(full.network, full.mean, full.prior)
        place = 0
        for block in result.blocks:
            _, units, size, _ = block.shape
            for unit in range(units):
                block[:, unit] = full.block(slice(place, place + size))
                place += size
        return result

    def _own(self, weights: Array) -> list[Array]:
        """The weights [P] of each layer, as [units, size]."""
        groups = [*self.network.groups, (len(self.network.start), -1, len(self.network.row))]
        layers = []
        for start, units, size in groups:
            end = None if units < 0 else start + units * size
            layers.append(weights[start:end].reshape(-1, size))
        return layers

    def look(self, weights: Array, x: Array) -> tuple[Array, Layers]:
        f, hidden, last = self.network.backward(weights, x)
        layers = [Layer(a, delta, block) for (a, delta), block in zip(hidden, self.blocks, strict=False)]
        return f, Layers(layers, Outputs(last, self.blocks[-1]))

    def shrink(self, found: Layers, b: Array, root: Array) -> None:
        r, n, k, _ = b.shape
        half = rooted(transposed(b), transposed(root) @ root)
        known = rooted(transposed(b), transposed(half)).reshape(r, n, k, n, k)  # B (I + B' V B)^-1 B'
        for layer, block in zip(found.every, self.blocks, strict=True):
            layer.shrink(block, known)

    def forget(self, kept: Array) -> None:
        for own, block in zip(self._own(self.prior), self.blocks, strict=True):
            inflate(block, own, kept)

    def grow(self, mean: Array, prior: Array) -> None:
        super().grow(mean, prior)
        new = diagonal_matrices(prior.reshape(-1, len(self.network.row)))
        self.blocks[-1] = np.concatenate([self.blocks[-1], np.stack([new] * len(self.mean))], 1)

    def reset(self, targets: NDArray[np.bool_], mean: Array) -> None:
        super().reset(targets, mean)
        for own, block in zip(self._own(self.prior), self.blocks, strict=True):
            block[targets] = diagonal_matrices(own)

    def copy(self, target: int, source: int) -> None:
        for array in (self.mean, *self.blocks):
            array[target] = array[source]

    def arrays(self) -> dict[str, Array]:
        return {"mean": self.mean, **{f"block {i}": block for i, block in enumerate(self.blocks)}}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        self.mean = arrays["mean"]
        self.blocks = [arrays[f"block {i}"] for i in range(len(self.blocks))]
