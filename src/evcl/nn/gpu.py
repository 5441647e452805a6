"""A linear layer's training pass and the update, in few kernels: on a GPU a step is as long as its list of kernels.

Means and variances lie in one buffer [2, R, P], so that their products are one batched product over 2R, and the rest is
four small Triton kernels around it. The noise is drawn inside the kernel that uses it. `LocalDraw` in layers.py and
`fused_update` in training/adam.py are the same in plain operations; the tests compare them where there is a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _stack(x, xx, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    tl.store(xx + at, value, mask=at < n)
    tl.store(xx + n + at, value * value, mask=at < n)


@triton.jit
def _draw(mv, bias, var_bias, seed, salt, y, ratio, n, rows, outs, stride, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """y = m + b + eps s, s = sqrt(v + c); ratio = eps / s. `stride` is the step from one replica's bias to the next."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    m = tl.load(mv + at, mask=inside)
    v = tl.load(mv + n + at, mask=inside)
    if BIAS:
        place = (at // (rows * outs)).to(tl.int64) * stride + at % outs
        m += tl.load(bias + place, mask=inside)
        v += tl.load(var_bias + place, mask=inside)
    s = tl.sqrt(tl.maximum(v, 1e-30))
    eps = tl.randn(tl.load(seed) + salt, at)
    tl.store(y + at, m + eps * s, mask=inside)
    tl.store(ratio + at, eps / s, mask=inside)


@triton.jit
def _back(
    g,
    ratio,
    gh,
    grad_bias,
    grad_var_bias,
    n,
    rows,
    outs,
    stride,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
):
    """gh = (g, h), h = g ratio; the biases' gradients are their sums over the examples."""
    r = tl.program_id(0)
    o = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    sum_g = tl.zeros((OUTS,), tl.float32)
    sum_h = tl.zeros((OUTS,), tl.float32)
    for start in range(0, rows, ROWS):
        b = start + tl.arange(0, ROWS)
        at = (r * rows + b[:, None]) * outs + o[None, :]
        inside = (b[:, None] < rows) & (o[None, :] < outs)
        value = tl.load(g + at, mask=inside, other=0.0)
        h = value * tl.load(ratio + at, mask=inside, other=0.0)
        tl.store(gh + at, value, mask=inside)
        tl.store(gh + n + at, h, mask=inside)
        sum_g += tl.sum(value, 0)
        sum_h += tl.sum(h, 0)
    if BIAS:
        place = r.to(tl.int64) * stride + o
        old = tl.load(grad_bias + place, mask=o < outs)
        tl.store(grad_bias + place, old + sum_g, mask=o < outs)
        old = tl.load(grad_var_bias + place, mask=o < outs)
        tl.store(grad_var_bias + place, old + sum_h, mask=o < outs)


@triton.jit
def _combine(d, x, dx, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(d + at, mask=inside) + tl.load(x + at, mask=inside) * tl.load(d + n + at, mask=inside)
    tl.store(dx + at, value, mask=inside)


class StackedDraw(torch.autograd.Function):
    """`LocalDraw` on x [R, B, i] with weights and gradients of means and variances stacked, [2, R, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        weight, bias, ctx.grads, seed, salt, _ = rest
        x = x.contiguous()
        r, b, i = x.shape
        o = weight.shape[2]
        xx = x.new_empty(2 * r, b, i)
        _stack[(triton.cdiv(x.numel(), BLOCK),)](x, xx, x.numel(), BLOCK=BLOCK)
        mv = torch.bmm(xx, weight.flatten(0, 1).mT)
        y, ratio = x.new_empty(r, b, o), x.new_empty(r, b, o)
        n = y.numel()
        biases = (bias[0], bias[1], bias.stride(1)) if bias is not None else (y, y, 0)
        _draw[(triton.cdiv(n, BLOCK),)](
            mv, biases[0], biases[1], seed, salt, y, ratio, n, b, o, biases[2], BIAS=bias is not None, BLOCK=BLOCK
        )  # fmt: skip
        ctx.save_for_backward(x, xx, weight, ratio)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        g = gradients[0].contiguous()
        x, xx, weight, ratio = ctx.saved_tensors
        grad_weight, grad_bias = ctx.grads
        r, b, o = g.shape
        gh = g.new_empty(2 * r, b, o)
        biases = (grad_bias[0], grad_bias[1], grad_bias.stride(1)) if grad_bias is not None else (g, g, 0)
        _back[(r, triton.cdiv(o, 32))](
            g, ratio, gh, biases[0], biases[1], g.numel(), b, o, biases[2],
            BIAS=grad_bias is not None, ROWS=64, OUTS=32,
        )  # fmt: skip
        grad_weight.flatten(0, 1).baddbmm_(gh.mT, xx)
        dx = None
        if ctx.needs_input_grad[0]:
            d = torch.bmm(gh, weight.flatten(0, 1))
            dx = torch.empty_like(x)
            _combine[(triton.cdiv(x.numel(), BLOCK),)](d, x, dx, x.numel(), BLOCK=BLOCK)
        return dx, None, None, None, None, None, None


@triton.jit
def _shift(y, bias, n, rows, outs, stride, BLOCK: tl.constexpr):
    """y += b, in place."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    place = (at // (rows * outs)).to(tl.int64) * stride + at % outs
    value = tl.load(y + at, mask=inside) + tl.load(bias + place, mask=inside)
    tl.store(y + at, value, mask=inside)


@triton.jit
def _sum(g, grad_bias, rows, outs, stride, ROWS: tl.constexpr, OUTS: tl.constexpr):
    """db += the sum of g over the examples."""
    r = tl.program_id(0)
    o = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    total = tl.zeros((OUTS,), tl.float32)
    for start in range(0, rows, ROWS):
        b = start + tl.arange(0, ROWS)
        at = (r * rows + b[:, None]) * outs + o[None, :]
        total += tl.sum(tl.load(g + at, mask=(b[:, None] < rows) & (o[None, :] < outs), other=0.0), 0)
    place = r.to(tl.int64) * stride + o
    tl.store(grad_bias + place, tl.load(grad_bias + place, mask=o < outs) + total, mask=o < outs)


class PlainProduct(torch.autograd.Function):
    """y = x W + b on [R, B, i] for weights that are points; gradients go to their place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        weight, bias, ctx.grads = rest
        ctx.save_for_backward(x, weight)
        y = torch.bmm(x, weight.mT)
        if bias is not None:
            _, b, o = y.shape
            _shift[(triton.cdiv(y.numel(), BLOCK),)](y, bias, y.numel(), b, o, bias.stride(0), BLOCK=BLOCK)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        g = gradients[0].contiguous()
        x, weight = ctx.saved_tensors
        grad_weight, grad_bias = ctx.grads
        r, b, o = g.shape
        if grad_bias is not None:
            _sum[(r, triton.cdiv(o, 32))](g, grad_bias, b, o, grad_bias.stride(0), ROWS=64, OUTS=32)
        grad_weight.baddbmm_(g.mT, x)
        return torch.bmm(g, weight) if ctx.needs_input_grad[0] else None, None, None, None


@triton.jit
def _nll(logits, labels, loss, grad, classes, rows, CLASSES: tl.constexpr):
    """One row: its NLL, and the gradient of the mean over `rows` rows."""
    row = tl.program_id(0)
    c = tl.arange(0, CLASSES)
    z = tl.load(logits + row * classes + c, mask=c < classes, other=-float("inf"))
    label = tl.load(labels + row)
    top = tl.max(z, 0)
    e = tl.exp(z - top)
    total = tl.sum(e, 0)
    hit = c == label
    tl.store(loss + row, tl.log(total) + top - tl.sum(tl.where(hit, z, 0.0), 0))
    tl.store(grad + row * classes + c, (e / total - tl.where(hit, 1.0, 0.0)) / rows, mask=c < classes)


class MeanNLL(torch.autograd.Function):
    """[R]: the mean NLL of logits [R*B, classes]; the gradient is that of the sum over the replicas."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, *rest: Any) -> Tensor:
        labels, replicas = rest
        logits = logits.contiguous()
        n, classes = logits.shape
        loss, grad = logits.new_empty(n), torch.empty_like(logits)
        rows = n // replicas
        _nll[(n,)](logits, labels, loss, grad, classes, rows, CLASSES=triton.next_power_of_2(classes))
        ctx.save_for_backward(grad)
        return loss.view(replicas, rows).mean(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (grad,) = ctx.saved_tensors
        return grad, None, None


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
    tl.store(grad + at, tl.zeros_like(g), mask=inside)
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
    """`fused_update` as one kernel; `lr` is [R, 1]. All buffers are contiguous, [R, P]."""
    n = weights.numel()
    linear, square = springs[0], springs[1] if len(springs) > 1 else None
    a, c = linear or (weights, weights)
    d, u = square or (weights, weights)
    _update[(triton.cdiv(n, BLOCK),)](
        weights, first, second, grad, count, lr, weights if variance is None else variance, a, c, d, u, n,
        weights.shape[1], LINEAR=linear is not None, SQUARE=square is not None, STD=variance is not None, BLOCK=BLOCK,
    )  # fmt: skip
