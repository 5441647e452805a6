"""Bayesian layers. Their weights live in the flat posterior; a layer only knows their names.

Replicas fold into the batch: a user's `forward` sees [R*B, ...]; a layer unfolds that to [R, B, ...] and multiplies
replica by replica. In training as in prediction each example sees one draw from the posterior. Without positions the
pre-activations are drawn, not the weights (local reparameterisation):

    y = x W + b + eps * sqrt(x^2 var(W) + var(b)),   eps ~ N(0, 1)

Where an example has positions (a convolution, a linear layer along a sequence), all of them share its weights. There is
one eps for the batch, and an example flips its signs, those of inputs by s and those of outputs by r (flipout, Wen et
al., 2018): its weights are Gaussian as they should be, and uncorrelated with any other example's.

    y = x W + b + r * ((s * x) (eps * sqrt(var(W)))),   r, s = +1 or -1,   b drawn for each example

Where a weight touches few numbers of an example (an embedding, the scale of a norm) it is drawn itself, anew for each
example: exact, and with less variance than one draw a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evcl._core.errors import EvclError, NoWeight
from evcl._core.randomness import Noise
from evcl.nn.posterior import he_std, he_uniform

EXAMPLE_GRADIENT_NUMBERS = 8_000_000  # of per-example gradients or patches at once: 32 MB in float32


class Grads(NamedTuple):
    """Gradients by name, views of flat buffers.

    `variance` holds twice the gradient: with v = sigma^2, d/d log sigma = 2 v d/dv.
    """

    mean: dict[str, Tensor]
    variance: dict[str, Tensor] | None


class Flips(NamedTuple):
    """Weights of each example's own: it sees `spread` with its signs turned, by these of its inputs and outputs."""

    spread: Tensor  # [R, *shape]: how far the weights of one draw are from their means
    ins: Tensor  # [R, B, i], 1 or -1
    outs: Tensor  # [R, B, o]


class Weights:
    """What the layers of one network compute with at the moment; all of them share this object."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.rows: Sequence[int] | Tensor | None = None  # which replicas these are, where it is some of them; None: all
        self.batch = 0  # rows that are going through the network, R*B
        self.mean: dict[str, Tensor] = {}  # name -> [R, *shape]: means, or drawn weights
        self.variance: dict[str, Tensor] | None = None  # None: no draw, the weights are `mean`
        self.noise: Noise | None = None  # None: not training, so no dropout and no draw
        self.grads: Grads | None = None  # where a training step wants the gradients; None: autograd returns them
        self.compute_dtype: torch.dtype | None = None  # of the products in training, where it is not the weights' own


class BayesianLayer(nn.Module):
    """A layer whose weights are named entries of the posterior.

    A layer of your own subclasses this, is made from the plain layer, and is added with `evcl.nn.register`. It needs
    `forward`, and `example_gradient` if a method that measures the Fisher is to train it; `neighbours` if that is to be
    spread. Buffers [R, ...] that are not persistent are its state beside the weights, a replica each: they are saved,
    loaded and moved with the run.
    """

    weights: Weights
    names: dict[str, str]  # the plain layer's parameter -> its name in the posterior
    path: str = ""  # where the plain layer stands in the module
    fold: int = 1  # rows an example has at this layer: more than 1 where positions were folded into the batch

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.names = {}
        self.rows: dict[str, slice] = {}  # of a parameter that is a part, along its first axis, of the one named
        self.pieces = 1  # layers of equal size that a parameter holds, one after another along its first axis
        self.own = dict(layer.named_parameters(recurse=False))  # the plain parameters, until they have been named

    def initial(self, parameter: str, source: torch.Generator) -> Tensor:
        """A first mean where it is drawn: He-uniform."""
        return he_uniform(self.own[parameter].shape, self.fan_in(parameter), source)

    def fan_in(self, parameter: str) -> int:
        """How many weights an output of the layer adds up."""
        return prod(self.own["weight"].shape[1:]) if "weight" in self.own else self.own[parameter].numel()

    def scale(self, parameter: str) -> float:
        """The standard deviation of first weights: that of He's distribution."""
        return he_std(self.fan_in(parameter))

    def centre(self, parameter: str) -> Tensor:
        """The mean of the first prior."""
        return torch.zeros_like(self.own[parameter])

    def begin(self) -> None:
        """A task begins."""

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            where = f"{self.path!r} ({type(self).__name__})"
            raise NoWeight(
                f"{where}: a Bayesian layer has no {name!r} to use elsewhere: call it, or a layer tied to it"
            )
        return super().__getattr__(name)

    def part(self, named: dict[str, Tensor] | None, parameter: str) -> Tensor | None:
        """This layer's part of what is named, [R, *shape]; None where the layer has no such parameter (no bias)."""
        if named is None or parameter not in self.names:
            return None
        whole = named[self.names[parameter]]
        return whole[:, self.rows[parameter]] if parameter in self.rows else whole

    def mean(self, parameter: str) -> Tensor | None:
        return self.part(self.weights.mean, parameter)

    def variance(self, parameter: str) -> Tensor | None:
        return self.part(self.weights.variance, parameter)

    def unfold(self, x: Tensor) -> Tensor:
        """[R*B, ...] -> [R, B, ...]"""
        return x.reshape(self.weights.replicas, -1, *x.shape[1:])

    def rows_each(self, x: Tensor) -> int:
        """Rows that an example has in x [R*B, ...]: more than 1 where positions were folded into the batch."""
        return self.fold if len(x) == self.fold * self.weights.batch else 1

    def normal(self, like: Tensor, *shape: int, shared: bool = False) -> Tensor:
        """Noise [R, *shape] from the run's own source: of [R, B, ...] numbers, or `shared` by all examples."""
        if self.weights.noise is None:
            raise RuntimeError("a draw needs a noise source")
        source = self.weights.noise.shared() if shared else self.weights.noise
        return source.normal_(like.new_empty(self.weights.replicas, *shape))

    def draw(self, mean: Tensor, variance: Tensor) -> Tensor:
        """mean + eps * sqrt(variance), both [R*B, ...]."""
        noise = self.normal(mean, mean.shape[0] // self.weights.replicas, *mean.shape[1:]).view_as(mean)
        # A row of zeros without a bias has no variance, and sqrt has no slope at 0.
        return torch.addcmul(mean, noise, variance.clamp_min(1e-30).sqrt())

    def drawn(self, parameter: str, times: int, shared: bool = False) -> Tensor | None:
        """That many draws of the weights, [R, times, *shape]; [R, 1, *shape] where they are points.

        An example has a draw, or several, of its own, or all of them are `shared` by the batch.
        """
        mean, variance = self.mean(parameter), self.variance(parameter)
        if mean is None or variance is None:
            return None if mean is None else mean.unsqueeze(1)
        noise = self.normal(mean, times, *mean.shape[1:], shared=shared)
        return torch.addcmul(mean.unsqueeze(1), noise, variance.clamp_min(1e-30).sqrt().unsqueeze(1))

    def flips(self, examples: int, ins: int) -> Flips:
        """A draw of the weights [R, o, ...] for each of B examples with this many inputs."""
        variance = self.variance("weight")
        assert variance is not None
        spread = self.normal(variance, *variance.shape[1:], shared=True) * variance.clamp_min(1e-30).sqrt()
        sizes = ins, variance.shape[1]
        signs = variance.new_ones(()).copysign(self.normal(variance, examples, sum(sizes)))
        return Flips(spread, *signs.split(sizes, 2))

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

    def neighbours(self, parameter: str, importance: Tensor, learned: bool) -> Tensor:
        """Of [R, *shape], for each weight the mean of those from the same input, plus, if the layer's inputs are
        `learned`, of those into the same unit: broadcast to that shape. 0 where a layer has no such units.
        """
        return importance.new_zeros(())


def of_units(importance: Tensor, learned: bool) -> Tensor:
    """`neighbours` of weights [R, o, ...], an output's each, or biases [R, o], whose input is 1."""
    alone = importance.shape[1] == 1  # no other weight has its input
    mean = importance.new_zeros(()) if alone else importance.mean(1, keepdim=True)
    if learned and importance.dim() > 2:
        mean = mean + importance.mean(list(range(2, importance.dim())), keepdim=True)
    return mean


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


local_draw: Callable[..., Tensor] = LocalDraw.apply
