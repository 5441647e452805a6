"""Bayesian layers. Their weights live in the flat posterior; a layer only knows their names.

Replicas fold into the batch: a user's `forward` sees [R*B, ...]; a layer unfolds that to [R, B, ...] and multiplies
replica by replica. Training draws the pre-activations, not the weights (local reparameterisation):

    y = x W + b + eps * sqrt(x^2 var(W) + var(b)),   eps ~ N(0, 1)

For a convolution, and for a linear layer along a sequence, this treats positions as independent: the usual
approximation.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evcl.errors import EvclError
from evcl.randomness import Noise

EXAMPLE_GRADIENT_NUMBERS = 8_000_000  # of per-example gradients or patches at once: 32 MB in float32


class Grads(NamedTuple):
    """Gradients by name, views of flat buffers.

    `variance` holds twice the gradient: with v = sigma^2, d/d log sigma = 2 v d/dv.
    """

    mean: dict[str, Tensor]
    variance: dict[str, Tensor] | None


class Weights:
    """What the layers of one network compute with at the moment; all of them share this object."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.mean: dict[str, Tensor] = {}  # name -> [R, *shape]: means, or drawn weights
        self.variance: dict[str, Tensor] | None = None  # None: no draw, the weights are `mean`
        self.noise: Noise | None = None  # None: not training, so no dropout and no draw
        self.grads: Grads | None = None  # where a training step wants the gradients; None: autograd returns them
        self.low: torch.dtype | None = None  # of the products in training, where it is not the weights' own


class BayesianLayer(nn.Module):
    """A layer whose weights are named entries of the posterior.

    A layer of your own subclasses this, is made from the plain layer, and is added with `evcl.nn.register`. It needs
    `forward`, and `example_gradient` if a method that measures the Fisher is to train it.
    """

    weights: Weights
    names: dict[str, str]  # the plain layer's parameter -> its name in the posterior

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.names = {}

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            raise AttributeError(f"a Bayesian layer has no {name!r} of its own: call the layer instead of using it")
        return super().__getattr__(name)

    def mean(self, parameter: str) -> Tensor | None:
        """[R, *shape], or None where the layer has no such parameter (no bias)."""
        return self.weights.mean[self.names[parameter]] if parameter in self.names else None

    def variance(self, parameter: str) -> Tensor | None:
        if self.weights.variance is None or parameter not in self.names:
            return None
        return self.weights.variance[self.names[parameter]]

    def unfold(self, x: Tensor) -> Tensor:
        """[R*B, ...] -> [R, B, ...]"""
        return x.reshape(self.weights.replicas, -1, *x.shape[1:])

    def draw(self, mean: Tensor, variance: Tensor) -> Tensor:
        """mean + eps * sqrt(variance), both [R*B, ...]."""
        if self.weights.noise is None:
            raise RuntimeError("a draw needs a noise source")
        shape = (self.weights.replicas, mean.shape[0] // self.weights.replicas, *mean.shape[1:])
        noise = self.weights.noise.normal_(mean.new_empty(shape)).view_as(mean)
        # A row of zeros without a bias has no variance, and sqrt has no slope at 0.
        return torch.addcmul(mean, noise, variance.clamp_min(1e-30).sqrt())

    def example_gradient(self, parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        """Each example's gradient [R, B, *shape], from the layer's input and its output's gradient, [R, B, ...]."""
        raise EvclError(f"{type(self).__name__} has no example_gradient: the Fisher cannot be measured through it")

    def rows_at_once(self, parameter: str, x: Tensor, delta: Tensor) -> int:
        """How many examples' gradients may be held at the same time."""
        return max(1, EXAMPLE_GRADIENT_NUMBERS // prod(self.weights.mean[self.names[parameter]].shape))

    def square_sum(self, parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        """sum_b (example b's gradient)^2: [R, *shape]. In pieces, since per-example gradients are large."""
        rows = self.rows_at_once(parameter, x, delta)
        pieces = zip(x.split(rows, 1), delta.split(rows, 1), strict=True)
        return torch.stack([self.example_gradient(parameter, xs, ds).square().sum(1) for xs, ds in pieces]).sum(0)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[R, B, i] x [R, o, i] + [R, o] -> [R, B, o]"""
    if x.shape[0] == 1:  # squeeze, not [0]: the gradient of an index is a copy into zeros
        return F.linear(x.squeeze(0), weight.squeeze(0), None if bias is None else bias.squeeze(0)).unsqueeze(0)
    if bias is None:
        return torch.bmm(x, weight.mT)
    return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a b, all [R, ., .], in place; a and b may be of a lower precision."""
    if a.dtype != out.dtype:
        out += torch.matmul(a, b)
    elif out.shape[0] == 1:
        out.squeeze(0).addmm_(a.squeeze(0), b.squeeze(0))
    else:
        out.baddbmm_(a, b)


class LocalDraw(torch.autograd.Function):
    """y = x W + b + eps s,  s = sqrt(x^2 var(W) + var(b)),  on [R, B, i]; without variances y = x W + b.

    Written out because it makes half the passes over memory that autograd makes, and adds each weight's gradient to
    its place in the flat buffers, where the update reads it:

        dW += g^T x    db += sum g    2 dvar(W) += h^T x^2    2 dvar(b) += sum h    dx = g W + x (h var(W))

    with g the gradient of y, and h = g eps / s. The layers' tests compare it with autograd on `Linear.forward`.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, *rest: Any) -> Tensor:
        *parts, noise, ctx.grads, low = rest
        full = parts[0].dtype
        inputs = [x, *parts, None if noise is None else x.square()]
        if low is not None:  # products in a low precision, everything else in the weights' own
            inputs = [None if t is None else t.to(low) for t in inputs]
        x, weight, bias, var_weight, var_bias, x2 = inputs
        y = product(x, weight, bias)
        if noise is None:
            ctx.save_for_backward(x, weight)
            return y.to(full, copy=True)  # not a view: an activation in place may follow
        std = product(x2, var_weight, var_bias).to(full).clamp_(min=1e-30).sqrt_()
        ctx.save_for_backward(x, weight, x2, var_weight, noise, std)
        return torch.addcmul(y.to(full), noise, std)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        g = gradients[0]
        x, weight, *drawn = ctx.saved_tensors
        grad_weight, grad_bias, grad_var_weight, grad_var_bias = ctx.grads
        low = g.to(x.dtype)
        add_product(grad_weight, low.mT, x)
        if grad_bias is not None:
            grad_bias += g.sum(1)
        dx = torch.matmul(low, weight).to(g.dtype) if ctx.needs_input_grad[0] else None
        if drawn:
            x2, var_weight, noise, std = drawn
            h = torch.mul(g, noise).div_(std)
            low = h.to(x.dtype)
            add_product(grad_var_weight, low.mT, x2)
            if grad_var_bias is not None:
                grad_var_bias += h.sum(1)
            if dx is not None:
                dx.addcmul_(x.to(g.dtype), torch.matmul(low, var_weight).to(g.dtype))
        return dx, None, None, None, None, None, None, None


_local_draw: Callable[..., Tensor] = LocalDraw.apply


class Linear(BayesianLayer):
    """nn.Linear on [R*B, i] or, along a sequence, [R*B, ..., i]."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.unfold(x).flatten(1, -2) if x.dim() > 2 else self.unfold(x)
        weight, bias = self.mean("weight"), self.mean("bias")
        assert weight is not None
        shape = (*x.shape[:-1], weight.shape[1])
        if self.weights.grads is not None:
            return self._train(flat, weight, bias).view(shape)
        mean = product(flat, weight, bias)
        variance_weight = self.variance("weight")
        if variance_weight is None:
            return mean.view(shape)
        variance = product(flat.square(), variance_weight, self.variance("bias"))
        return self.draw(mean.view(shape), variance.view(shape))

    def _train(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same, with gradients that go straight into the flat buffers."""
        grads, noise = self.weights.grads, None
        assert grads is not None
        named = [self.names.get(p) for p in ("weight", "bias")]
        mean_grads = tuple(None if n is None else grads.mean[n] for n in named)
        variance_grads: tuple[Tensor | None, ...] = (None, None)
        if self.weights.variance is not None:
            assert self.weights.noise is not None
            assert grads.variance is not None
            noise = self.weights.noise.normal_(weight.new_empty(*x.shape[:2], weight.shape[1]))
            variance_grads = tuple(None if n is None else grads.variance[n] for n in named)
        variances = self.variance("weight"), self.variance("bias")
        out: Tensor = _local_draw(x, weight, bias, *variances, noise, (*mean_grads, *variance_grads), self.weights.low)
        return out

    def example_gradient(self, parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        if parameter == "bias":
            return delta.flatten(2, -2).sum(2) if delta.dim() > 3 else delta
        if delta.dim() == 3:
            return delta.unsqueeze(-1) * x.unsqueeze(-2)
        return delta.flatten(2, -2).mT @ x.flatten(2, -2)

    def square_sum(self, parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        """Without positions, sum_b (d_b x_b)^2 = (d^2)^T (x^2): one product."""
        if delta.dim() > 3:
            return super().square_sum(parameter, x, delta)
        if parameter == "bias":
            return delta.square().sum(1)
        return torch.bmm(delta.square().mT, x.square())


class Conv2d(BayesianLayer):
    """nn.Conv2d: stride, padding of every kind, dilation, groups."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__(layer)
        self.stride, self.dilation, self.groups = layer.stride, layer.dilation, layer.groups
        self.kernel = layer.kernel_size
        self.pad_mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        self.pad = self._padding(layer)

    @staticmethod
    def _padding(layer: nn.Conv2d) -> tuple[int, int, int, int]:
        """(left, right, top, bottom), as F.pad wants them."""
        if layer.padding == "same":
            h, w = (d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True))
            return w // 2, w - w // 2, h // 2, h - h // 2
        if layer.padding == "valid":
            return 0, 0, 0, 0
        h, w = (int(p) for p in layer.padding)
        return w, w, h, h

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4:
            raise EvclError(f"Conv2d takes [batch, channels, height, width], not a shape {tuple(x.shape)}")
        x = F.pad(x, self.pad, mode=self.pad_mode) if any(self.pad) else x
        mean = self._convolve(x, self.mean("weight"), self.mean("bias"))
        variance_weight = self.variance("weight")
        if variance_weight is None:
            return mean
        return self.draw(mean, self._convolve(x.square(), variance_weight, self.variance("bias")))

    def _convolve(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """[R*B, c, h, w]. Replicas become groups of one convolution over [B, R*c, h, w]."""
        assert weight is not None
        r = weight.shape[0]
        if r > 1:
            x = self.unfold(x).transpose(0, 1).flatten(1, 2)
        y = F.conv2d(
            x,
            weight.flatten(0, 1),
            None if bias is None else bias.flatten(),
            self.stride,
            0,
            self.dilation,
            r * self.groups,
        )
        return y if r == 1 else y.unflatten(1, (r, -1)).transpose(0, 1).flatten(0, 1)

    def rows_at_once(self, parameter: str, x: Tensor, delta: Tensor) -> int:
        """The unfolded patches, [R, B, c*k, l], are larger than the gradients."""
        patches = x.shape[0] * x.shape[2] * prod(self.kernel) * prod(delta.shape[-2:])
        return min(super().rows_at_once(parameter, x, delta), max(1, EXAMPLE_GRADIENT_NUMBERS // patches))

    def example_gradient(self, parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        """The product over positions of one example: [R, B, o, l] x [R, B, l, i*k] a group."""
        if parameter == "bias":
            return delta.sum((-2, -1))
        r, b = x.shape[:2]
        x = x.flatten(0, 1)
        x = F.pad(x, self.pad, mode=self.pad_mode) if any(self.pad) else x
        patches = F.unfold(x, self.kernel, self.dilation, 0, self.stride)  # [R*B, c*k, l]
        patches = patches.unflatten(1, (self.groups, -1))
        delta = delta.flatten(0, 1).flatten(2).unflatten(1, (self.groups, -1))  # [R*B, g, o/g, l]
        shape = self.weights.mean[self.names[parameter]].shape[1:]
        gradient: Tensor = delta @ patches.mT
        return gradient.reshape(r, b, *shape)


class Dropout(BayesianLayer):
    """Dropout and its channel-wise forms, drawing from the run's own noise."""

    def __init__(self, layer: nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d, positions: int = 0) -> None:
        super().__init__(layer)
        self.p = layer.p
        self.positions = positions  # trailing axes that are dropped as one

    def forward(self, x: Tensor) -> Tensor:
        noise = self.weights.noise
        if noise is None or self.p == 0:
            return x
        if self.p == 1:
            return torch.zeros_like(x)
        shape = [*x.shape[: x.dim() - self.positions], *[1] * self.positions]
        r = self.weights.replicas
        keep = noise.uniform_(x.new_empty(r, shape[0] // r, *shape[1:])).view(shape) >= self.p
        return x * keep / (1 - self.p)
