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
        self.low: torch.dtype | None = None  # of the products in training, where it is not the weights' own


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


_local_draw: Callable[..., Tensor] = LocalDraw.apply


class Linear(BayesianLayer):
    """nn.Linear on [R*B, i] or, along a sequence, [R*B, ..., i]."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.unfold(x).flatten(1, -2) if x.dim() > 2 else self.unfold(x)
        weight, bias = self.mean("weight"), self.mean("bias")
        assert weight is not None
        shape = (*x.shape[:-1], weight.shape[1])
        positions = self.rows_each(x) * prod(x.shape[1:-1])
        if positions > 1 and self.weights.variance is not None:
            return self._along(flat, positions, weight).view(shape)
        if self.weights.grads is not None:
            return self._train(flat, weight, bias).view(shape)
        mean = product(flat, weight, bias)
        variance_weight = self.variance("weight")
        if variance_weight is None:
            return mean.view(shape)
        variance = product(flat.square(), variance_weight, self.variance("bias"))
        return self.draw(mean.view(shape), variance.view(shape))

    def _along(self, x: Tensor, positions: int, weight: Tensor) -> Tensor:
        """Of x [R, B*t, i]: the t positions of an example share its draw of the weights."""
        examples = x.shape[1] // positions
        spread, ins, outs = self.flips(examples, x.shape[2])
        each, low = (self.weights.replicas, examples, positions, -1), self.weights.low
        flipped = (x.reshape(each) * ins.unsqueeze(2)).reshape(x.shape)
        if low is None:
            mean, deviation = product(x, weight, None), product(flipped, spread, None)
        else:
            mean = product(x.to(low), weight.to(low), None).to(x.dtype)
            deviation = product(flipped.to(low), spread.to(low), None).to(x.dtype)
        y = torch.addcmul(mean.view(each), deviation.view(each), outs.unsqueeze(2))
        bias = self.drawn("bias", examples)
        return y if bias is None else y.add_(bias.unsqueeze(2))

    def _train(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same, with gradients that go straight into the flat buffers."""
        grads, noise = self.weights.grads, None
        assert grads is not None
        mean_grads = tuple(self.part(grads.mean, p) for p in ("weight", "bias"))
        variance_grads: tuple[Tensor | None, ...] = (None, None)
        if self.weights.variance is not None:
            noise = self.normal(weight, x.shape[1], weight.shape[1])
            variance_grads = tuple(self.part(grads.variance, p) for p in ("weight", "bias"))
        variances = self.variance("weight"), self.variance("bias")
        out: Tensor = _local_draw(x, weight, bias, *variances, noise, (*mean_grads, *variance_grads), self.weights.low)
        return out

    def example_gradient(self, parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        if parameter == "bias":
            return delta.flatten(2, -2).sum(2) if delta.dim() > 3 else delta
        if delta.dim() == 3:
            return delta.unsqueeze(-1) * x.unsqueeze(-2)
        return delta.flatten(2, -2).mT @ x.flatten(2, -2)

    def neighbours(self, parameter: str, importance: Tensor, learned: bool) -> Tensor:
        return of_units(importance, learned)

    def square_sum(self, parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        """Without positions, sum_b (d_b x_b)^2 = (d^2)^T (x^2): one product."""
        if delta.dim() > 3:
            return super().square_sum(parameter, x, delta)
        if parameter == "bias":
            return delta.square().sum(1)
        return torch.bmm(delta.square().mT, x.square())


class Conv(BayesianLayer):
    """nn.Conv1d and nn.Conv2d: stride, padding of every kind, dilation, groups."""

    def __init__(self, layer: nn.Conv1d | nn.Conv2d) -> None:
        super().__init__(layer)
        self.stride, self.dilation, self.groups = layer.stride, layer.dilation, layer.groups
        self.kernel = layer.kernel_size
        self.pad_mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        self.pad = self._padding(layer)
        self.padding = (0,) * len(self.kernel)
        if self.pad_mode == "constant" and self.pad[::2] == self.pad[1::2]:  # the convolution itself does it, faster
            self.padding, self.pad = self.pad[::-2], ()

    @staticmethod
    def _padding(layer: nn.Conv1d | nn.Conv2d) -> tuple[int, ...]:
        """(left, right, top, bottom), as F.pad wants them: the last axis first."""
        if layer.padding == "same":
            whole = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        else:
            whole = [0] * len(layer.kernel_size) if layer.padding == "valid" else [2 * int(p) for p in layer.padding]
        return tuple(side for n in reversed(whole) for side in (n // 2, n - n // 2))

    def forward(self, x: Tensor) -> Tensor:
        rank = len(self.kernel)
        if x.dim() != rank + 2:
            wanted = ", ".join(("height", "width")[2 - rank :])
            raise EvclError(f"Conv{rank}d takes [batch, channels, {wanted}], not a shape {tuple(x.shape)}")
        rows = self.rows_each(x)
        x = F.pad(x, self.pad, mode=self.pad_mode) if any(self.pad) else x
        if self.weights.variance is None:
            return self._convolve(x, self.mean("weight"), self.mean("bias"))
        spread, ins, outs = self.flips(len(x) // (rows * self.weights.replicas), x.shape[1])

        def spread_out(each: Tensor) -> Tensor:
            """[R, B, c] -> [R*B, c, 1, 1]: for all rows and positions of an example."""
            wide = each.unsqueeze(2).expand(-1, -1, rows, -1).reshape(len(x), -1)
            return wide.view(*wide.shape, *[1] * rank)

        deviation = self._convolve(x * spread_out(ins), spread, None)
        y = torch.addcmul(self._convolve(x, self.mean("weight"), None), deviation, spread_out(outs))
        bias = self.drawn("bias", ins.shape[1])
        return y if bias is None else y.add_(spread_out(bias))

    def _convolve(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """[R*B, c, h, w]. Replicas become groups of one convolution over [B, R*c, h, w]."""
        assert weight is not None
        r = weight.shape[0]
        if r > 1:
            x = self.unfold(x).transpose(0, 1).flatten(1, 2)
        convolution: Callable[..., Tensor] = F.conv1d if len(self.kernel) == 1 else F.conv2d
        shift = None if bias is None else bias.flatten()
        y = convolution(x, weight.flatten(0, 1), shift, self.stride, self.padding, self.dilation, r * self.groups)
        return y if r == 1 else y.unflatten(1, (r, -1)).transpose(0, 1).flatten(0, 1)

    def neighbours(self, parameter: str, importance: Tensor, learned: bool) -> Tensor:
        """Group by group, for each has inputs of its own; but one constant is the input of every bias."""
        if parameter == "bias":
            return of_units(importance, learned)
        groups = importance.unflatten(1, (self.groups, -1)).flatten(0, 1)
        return of_units(groups, learned).expand_as(groups).reshape(importance.shape)

    def rows_at_once(self, parameter: str, x: Tensor, delta: Tensor) -> int:
        """The unfolded patches, [R, B, c*k, l], are larger than the gradients."""
        patches = x.shape[0] * x.shape[2] * prod(self.kernel) * prod(delta.shape[3:])
        return min(super().rows_at_once(parameter, x, delta), max(1, EXAMPLE_GRADIENT_NUMBERS // patches))

    def example_gradient(self, parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        """The product over positions of one example: [R, B, o, l] x [R, B, l, i*k] a group."""
        if parameter == "bias":
            return delta.flatten(3).sum(3)
        r, b = x.shape[:2]
        x = x.flatten(0, 1)
        x = F.pad(x, self.pad, mode=self.pad_mode) if any(self.pad) else x
        how = [self.kernel, self.dilation, self.padding, self.stride]
        if len(self.kernel) == 1:  # a sequence is an image of one line
            x, how = x.unsqueeze(2), [(one, *sizes) for one, sizes in zip((1, 1, 0, 1), how, strict=True)]
        patches = F.unfold(x, *how).unflatten(1, (self.groups, -1))  # [R*B, g, c/g*k, l]
        delta = delta.flatten(0, 1).flatten(2).unflatten(1, (self.groups, -1))  # [R*B, g, o/g, l]
        shape = self.weights.mean[self.names[parameter]].shape[1:]
        gradient: Tensor = delta @ patches.mT
        return gradient.reshape(r, b, *shape)


class Embedding(BayesianLayer):
    """nn.Embedding on indices [R*B] or [R*B, ...], of any type of number.

    In training each example has its own draw of each row it asks for, however often it asks. The row of `padding_idx`
    is no weight: it stays as the plain layer has it.
    """

    padding: Tensor

    def __init__(self, layer: nn.Embedding) -> None:
        super().__init__(layer)
        if layer.max_norm is not None or layer.scale_grad_by_freq:
            raise EvclError("an Embedding with max_norm or scale_grad_by_freq has no Bayesian form: leave them out")
        self.size, self.padding_idx = layer.num_embeddings, layer.padding_idx
        if self.padding_idx is not None:
            self.register_buffer("padding", layer.weight.detach()[self.padding_idx].clone())

    def initial(self, parameter: str, source: torch.Generator) -> Tensor:
        return self._with_padding(super().initial(parameter, source))

    def centre(self, parameter: str) -> Tensor:
        """Where it is, for the row of the padding, which then never moves."""
        return self._with_padding(super().centre(parameter))

    def _with_padding(self, rows: Tensor) -> Tensor:
        if self.padding_idx is not None:
            rows[self.padding_idx] = self.padding
        return rows

    def forward(self, x: Tensor) -> Tensor:
        examples = len(x) // (self.weights.replicas * self.rows_each(x))
        index = x.long().reshape(self.weights.replicas, examples, -1)  # [R, B, t]
        out, variance = self._look_up("mean", index), self._look_up("variance", index)
        assert out is not None
        if variance is not None:
            noise = self.normal(out, *out.shape[1:])
            leaders = _leaders(index).unsqueeze(-1).expand_as(noise)
            out = torch.addcmul(out, noise.gather(2, leaders), variance.clamp_min(1e-30).sqrt())
        if self.padding_idx is not None:
            out = torch.where((index == self.padding_idx).unsqueeze(-1), self.padding, out)
        return out.reshape(*x.shape, out.shape[-1])

    def _look_up(self, what: str, index: Tensor) -> Tensor | None:
        """[R, B, t, d]: a look-up a replica, so that an index that is too large is not another replica's."""
        table = self.mean("weight") if what == "mean" else self.variance("weight")
        if table is None:
            return None
        try:
            return torch.stack([F.embedding(i, rows) for i, rows in zip(index, table, strict=True)])
        except IndexError:
            raise EvclError(
                f"{self.path!r} (Embedding) has rows 0 to {self.size - 1}, and other indices came"
            ) from None

    def neighbours(self, parameter: str, importance: Tensor, learned: bool) -> Tensor:
        """A row is what comes from one input, which is an index and not learned."""
        return importance.mean(2, keepdim=True)

    def square_sum(self, parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        """A row's gradient is summed over the positions that ask for it, at one of them, and squared there."""
        index, delta = self._positions(x, delta)
        leaders = _leaders(index).unsqueeze(-1).expand_as(delta)
        squares = torch.zeros_like(delta).scatter_add_(2, leaders, delta).square()
        total = delta.new_zeros(len(index), self.size, delta.shape[-1])
        return total.scatter_add_(
            1, index.flatten(1).unsqueeze(-1).expand(-1, -1, delta.shape[-1]), squares.flatten(1, 2)
        )

    def example_gradient(self, parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        index, delta = self._positions(x, delta)
        gradient = delta.new_zeros(*index.shape[:2], self.size, delta.shape[-1])
        return gradient.scatter_add_(2, index.unsqueeze(-1).expand_as(delta), delta)

    def _positions(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Indices [R, B, t], and gradients [R, B, t, d] without those of the padding."""
        index = x.long().reshape(*x.shape[:2], -1)
        delta = delta.reshape(*index.shape, delta.shape[-1])
        if self.padding_idx is not None:
            delta = delta.masked_fill((index == self.padding_idx).unsqueeze(-1), 0)
        return index, delta


def _leaders(index: Tensor) -> Tensor:
    """[..., t]: for each position, the first one that has its index, which stands for all of them."""
    found, order = index.sort(stable=True)
    place = torch.arange(index.shape[-1], device=index.device).expand_as(index)
    first = F.pad(found[..., 1:] != found[..., :-1], (1, 0), value=True)
    start = torch.where(first, place, 0).cummax(-1).values
    return torch.empty_like(order).scatter_(-1, order, order.gather(-1, start))


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
