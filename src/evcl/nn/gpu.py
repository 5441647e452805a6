"""`chain.py` and the update in few kernels: on a GPU a step is as long as its list of kernels.

Means and variances lie in one buffer [2, R, P], so that their products are one batched product over 2R; all that lies
between two products is one Triton kernel, which draws its noise where it uses it. Widths are padded to what the matrix
units want; a padded unit is always 0. `Chain` in chain.py and `Update` in training/update.py are the same in plain
operations; the tests compare them where there is a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from evcl.nn.chain import Examples, Place
from evcl.randomness import DeviceNoise, Noise

BLOCK = 1024


@triton.jit
def _gather(x, rows, xx, n, own, examples, ins, stored, size, DRAW: tl.constexpr, BLOCK: tl.constexpr):
    """xx = (x, x^2) of the examples `rows` [R, size]; one row a program. There is data for `own` replicas."""
    row = tl.program_id(0)
    source = tl.load(rows + row) + (row // size % own).to(tl.int64) * examples
    c = tl.arange(0, BLOCK)
    value = tl.load(x + source * ins + c, mask=c < ins, other=0.0)
    at = row.to(tl.int64) * stored + c
    tl.store(xx + at, value, mask=c < stored)
    if DRAW:
        tl.store(xx + n + at, value * value, mask=c < stored)


@triton.jit
def _activate(mv, bias, var_bias, seed, salt, xx, ratio, n, rows, outs, units, stride,
              DRAW: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """xx = (y, y^2), y = relu(m + b + eps s), s = sqrt(v + c); ratio = eps / s. `stride`: from a replica's bias on."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    o = at % outs
    y = tl.load(mv + at, mask=inside, other=0.0).to(tl.float32)
    place = at // (rows * outs) * stride + o
    if BIAS:
        y += tl.load(bias + place, mask=inside, other=0.0)
    if DRAW:
        v = tl.load(mv + n + at, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            v += tl.load(var_bias + place, mask=inside, other=0.0)
        s = tl.sqrt(tl.where(v < 1e-30, 1e-30, v))
        eps = tl.where(o < units, tl.randn(tl.load(seed) + salt, at), 0.0)
        y += eps * s
        tl.store(ratio + at, eps / s, mask=inside)
    y = tl.where((o >= units) | (y < 0.0), 0.0, y)  # NaN stays NaN
    tl.store(xx + at, y, mask=inside)
    if DRAW:
        tl.store(xx + n + at, y * y, mask=inside)


@triton.jit
def _loss(mv, bias, var_bias, seed, salt, rows, y, columns, gh, grad_bias, grad_var_bias, nll, n, own, examples,
          size, classes, stride, HEADS: tl.constexpr, DRAW: tl.constexpr, ROWS: tl.constexpr,
          CLASSES: tl.constexpr):  # fmt: skip
    """The heads: logits, the mean NLL, its gradients gh = (g, h) and their sums over the examples; one replica a program."""
    r = tl.program_id(0)
    c = tl.arange(0, CLASSES)
    known = c < classes
    place = r.to(tl.int64) * stride + c
    shift = tl.load(bias + place, mask=known, other=0.0)
    if DRAW:
        spread = tl.load(var_bias + place, mask=known, other=0.0)
        source_seed = tl.load(seed) + salt
    total = tl.zeros((), tl.float32)
    sum_g = tl.zeros((CLASSES,), tl.float32)
    sum_h = tl.zeros((CLASSES,), tl.float32)
    for start in range(0, size, ROWS):
        b = start + tl.arange(0, ROWS)
        present = b < size
        row = r * size + b
        at = row[:, None] * classes + c[None, :]
        inside = present[:, None] & known[None, :]
        z = tl.load(mv + at, mask=inside, other=0.0).to(tl.float32) + shift[None, :]
        if DRAW:
            v = tl.load(mv + n + at, mask=inside, other=0.0).to(tl.float32) + spread[None, :]
            s = tl.sqrt(tl.where(v < 1e-30, 1e-30, v))
            eps = tl.randn(source_seed, at)
            z += eps * s
        source = tl.load(rows + row, mask=present, other=0)
        open_ = known[None, :] & (b[:, None] >= 0)
        if HEADS:
            open_ = open_ & (c[None, :] >= tl.load(columns + 2 * source, mask=present, other=0)[:, None])
            open_ = open_ & (c[None, :] < tl.load(columns + 2 * source + 1, mask=present, other=1)[:, None])
        z = tl.where(open_, z, -float("inf"))
        source += (r % own).to(tl.int64) * examples
        hit = c[None, :] == tl.load(y + source, mask=present, other=0)[:, None]
        top = tl.max(z, 1)
        e = tl.exp(z - top[:, None])
        whole = tl.sum(e, 1)
        loss = tl.log(whole) + top - tl.sum(tl.where(hit, z, 0.0), 1)
        total += tl.sum(tl.where(present, loss, 0.0), 0)
        g = tl.where(inside, (e / whole[:, None] - tl.where(hit, 1.0, 0.0)) / size, 0.0)
        tl.store(gh + at, g, mask=inside)
        sum_g += tl.sum(g, 0)
        if DRAW:
            h = g * eps / s
            tl.store(gh + n + at, h, mask=inside)
            sum_h += tl.sum(h, 0)
    tl.store(nll + r, total / size)
    tl.store(grad_bias + place, sum_g, mask=known)
    if DRAW:
        tl.store(grad_var_bias + place, sum_h, mask=known)


@triton.jit
def _back(d, xx, ratio, gh, grad_bias, grad_var_bias, n, rows, outs, stride,
          DRAW: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr):  # fmt: skip
    """gh = (g, h) of a layer with ReLU from its outputs y and the products d of the layer above; the biases' gradients.

    g = d_0 + y d_1 where y > 0, h = g ratio.
    """
    r = tl.program_id(0)
    o = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    sum_g = tl.zeros((OUTS,), tl.float32)
    sum_h = tl.zeros((OUTS,), tl.float32)
    for start in range(0, rows, ROWS):
        b = start + tl.arange(0, ROWS)
        at = (r * rows + b[:, None]) * outs + o[None, :]
        inside = (b[:, None] < rows) & (o[None, :] < outs)
        y = tl.load(xx + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(d + at, mask=inside, other=0.0).to(tl.float32)
        if DRAW:
            g += y * tl.load(d + n + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.where(y > 0, g, 0.0)
        tl.store(gh + at, g, mask=inside)
        sum_g += tl.sum(g, 0)
        if DRAW:
            h = g * tl.load(ratio + at, mask=inside, other=0.0)
            tl.store(gh + n + at, h, mask=inside)
            sum_h += tl.sum(h, 0)
    if BIAS:
        place = r.to(tl.int64) * stride + o
        tl.store(grad_bias + place, sum_g, mask=o < outs)
        if DRAW:
            tl.store(grad_var_bias + place, sum_h, mask=o < outs)


class Chain:
    """`chain.Chain` on a GPU."""

    def __init__(
        self, places: list[Place], values: Tensor, grads: Tensor, examples: Examples, low: torch.dtype | None
    ) -> None:
        self.places, self.examples, self.values, self.grads, self.low = places, examples, values, grads, low
        self.x = examples.x.flatten(2).to(low or values.dtype).contiguous()
        self.weights = values if low is None else values.to(low)
        self.buffers: dict[int, _Buffers] = {}

    def __call__(self, rows: Tensor, noise: Noise) -> Tensor:
        assert isinstance(noise, DeviceNoise)
        size = rows.shape[1]
        if size not in self.buffers:
            self.buffers[size] = _Buffers(self, size)
        if self.low is not None:
            self.weights.copy_(self.values)
        self._forward(self.buffers[size], rows, noise.seed)
        self._backward(self.buffers[size])
        return self.buffers[size].nll

    def _forward(self, of: _Buffers, rows: Tensor, seed: Tensor) -> None:
        """All the way to the gradients of the logits."""
        draw, (r, size) = len(self.values) == 2, rows.shape
        x, y, columns = self.x, self.examples.y, self.examples.columns
        stored = self.places[0].ins
        _gather[(r * size,)](
            x, rows, of.xx[0], r * size * stored, len(x), x.shape[1], x.shape[2], stored, size,
            DRAW=draw, BLOCK=triton.next_power_of_2(stored),
        )  # fmt: skip
        for layer, place in enumerate(self.places):
            torch.bmm(of.xx[layer], place.weights(self.weights).flatten(0, 1).mT, out=of.mv[layer])
            n, (bias, var_bias) = r * size * place.outs, self._biases(place, self.values)
            stride, salt = self.values.stride(1), (layer + 1) << 32
            if layer + 1 < len(self.places):
                _activate[(triton.cdiv(n, BLOCK),)](
                    of.mv[layer], bias, var_bias, seed, salt, of.xx[layer + 1], of.ratio[layer], n, size, place.outs,
                    place.units, stride, DRAW=draw, BIAS=place.bias is not None, BLOCK=BLOCK,
                )  # fmt: skip
                continue
            classes = triton.next_power_of_2(place.outs)
            _loss[(r,)](
                of.mv[layer], bias, var_bias, seed, salt, rows, y, y if columns is None else columns, of.gh[layer],
                *self._biases(place, self.grads), of.nll, n, len(y), y.shape[1], size, place.outs, stride,
                HEADS=columns is not None, DRAW=draw, CLASSES=classes, num_warps=8,
                ROWS=max(1, min(triton.next_power_of_2(size), 8192 // classes)),
            )  # fmt: skip

    def _backward(self, of: _Buffers) -> None:
        draw, (r, size) = len(self.values) == 2, of.shape
        for layer, place in reversed(list(enumerate(self.places))):
            if layer + 1 < len(self.places):
                _back[(r, triton.cdiv(place.outs, 32))](
                    of.d[layer + 1], of.xx[layer + 1], of.ratio[layer], of.gh[layer],
                    *self._biases(place, self.grads), r * size * place.outs, size, place.outs, self.grads.stride(1),
                    DRAW=draw, BIAS=place.bias is not None, ROWS=64, OUTS=32,
                )  # fmt: skip
            grad = place.weights(self.grads).flatten(0, 1)
            if self.low is None:
                grad.baddbmm_(of.gh[layer].mT, of.xx[layer], beta=0)
            else:
                grad.copy_(torch.bmm(of.gh[layer].mT, of.xx[layer]))
            if layer > 0:
                torch.bmm(of.gh[layer], place.weights(self.weights).flatten(0, 1), out=of.d[layer])

    @staticmethod
    def _biases(place: Place, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The means' and the variances'; something to point at where there are none."""
        found = place.biases(flat)
        return (flat, flat) if found is None else (found[0], found[-1])


class _Buffers:
    """What a chain's pass writes for batches of one size: [S * R, size, ...], and of `ratio` [R, size, ...]."""

    def __init__(self, chain: Chain, size: int) -> None:
        s, r = chain.values.shape[:2]
        self.shape = r, size

        def each(widths: list[int], copies: int = s * r, like: Tensor = chain.weights) -> list[Tensor]:
            return [like.new_empty(copies, size, width) for width in widths]

        ins, outs = [place.ins for place in chain.places], [place.outs for place in chain.places]
        self.xx, self.d, self.mv, self.gh = each(ins), each(ins), each(outs), each(outs)
        self.ratio = each(outs, r, chain.values)
        self.nll = chain.values.new_empty(r)


@triton.jit
def _one_minus_exp(x):
    """1 - exp(x), without the loss of digits near 0."""
    return tl.where(x > -0.1, -x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5)))), 1 - tl.exp(x))


@triton.jit
def _update(w, first, second, grad, count, lr, v, a, c, d, u, n, columns,
            LINEAR: tl.constexpr, SQUARE: tl.constexpr, STD: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    weight = tl.load(w + at, mask=inside)
    g = tl.load(grad + at, mask=inside)
    z = weight
    if STD:
        z = tl.load(v + at, mask=inside)
        g *= z
    if LINEAR:
        g += tl.load(a + at, mask=inside) * (z - tl.load(c + at, mask=inside))
    if SQUARE:
        g += tl.load(d + at, mask=inside) * z * (z - tl.load(u + at, mask=inside))
    steps = tl.load(count)
    m = 0.9 * tl.load(first + at, mask=inside) + (1 - 0.9) * g
    s = 0.999 * tl.load(second + at, mask=inside) + (1 - 0.999) * g * g
    unbiased = m / _one_minus_exp(steps * -0.10536051565782628)  # 1 - 0.9 ** steps
    root = tl.sqrt(s / _one_minus_exp(steps * -0.0010005003335835335)) + 1e-8  # 1 - 0.999 ** steps
    weight -= tl.load(lr + at // columns, mask=inside) * unbiased / root
    tl.store(first + at, m, mask=inside)
    tl.store(second + at, s, mask=inside)
    tl.store(w + at, weight, mask=inside)
    if STD:
        tl.store(v + at, tl.exp(2 * weight), mask=inside)


def update(
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    count: Tensor,
    lr: Tensor,
    grad: Tensor,
    variance: Tensor | None,
    springs: Any,
) -> None:
    """Adam on means (`variance` None) or log sigmas, the pull included; `lr` is [R, 1]. All buffers are [R, P].

    `springs` are the stiffness and centre of each part of the pull: the mean's, or the linear and the square one.
    """
    n = weights.numel()
    linear, square = springs[0], springs[1] if len(springs) > 1 else None
    a, c = linear or (weights, weights)
    d, u = square or (weights, weights)
    _update[(triton.cdiv(n, BLOCK),)](
        weights, first, second, grad, count, lr, weights if variance is None else variance, a, c, d, u, n,
        weights.shape[1], LINEAR=linear is not None, SQUARE=square is not None, STD=variance is not None, BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def _natural(
    w, curvature, grad, count, rate, variance, k, s, d, u, n, columns, SQUARE: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    v = tl.load(variance + at, mask=inside, other=1.0)
    h = 0.999 * tl.load(curvature + at, mask=inside) + (1 - 0.999) * tl.load(grad + at, mask=inside)
    tl.store(curvature + at, h, mask=inside)
    weight = tl.load(k + at, mask=inside, other=1.0)
    unbiased = h / _one_minus_exp(tl.load(count) * -0.0010005003335835335)  # 1 - 0.999 ** steps
    stiff = weight + tl.where(unbiased < 0.0, 0.0, unbiased)  # NaN stays NaN
    if SQUARE:
        stiff += tl.load(d + at, mask=inside) * (v - tl.load(u + at, mask=inside))
    stiff = tl.where(stiff < 0.1 * weight, 0.1 * weight, stiff)
    ratio = weight / stiff * (tl.load(s + at, mask=inside, other=1.0) / v)
    move = 0.5 * tl.load(rate + at // columns, mask=inside) * tl.log(ratio)
    new = tl.load(w + at, mask=inside) + move
    tl.store(w + at, new, mask=inside)
    tl.store(variance + at, tl.where(move == 0.0, v, tl.exp(2 * new)), mask=inside)


def natural(
    weights: Tensor, curvature: Tensor, count: Tensor, rate: Tensor, grad: Tensor, variance: Tensor, springs: Any
) -> None:
    """The natural step of training/update.py; `rate` is [R, 1]."""
    n, (k, s) = weights.numel(), springs[0]
    d, u = springs[1] or (weights, weights)
    _natural[(triton.cdiv(n, BLOCK),)](
        weights, curvature, grad, count, rate, variance, k, s, d, u, n, weights.shape[1],
        SQUARE=springs[1] is not None, BLOCK=BLOCK,
    )  # fmt: skip
