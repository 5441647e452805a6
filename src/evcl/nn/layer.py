"""Bayesian layers. Their weights are stored in the flat posterior; a layer only knows their names.

Replicas are folded into the batch: a user's `forward` receives [R*B, ...]; a layer unfolds that to [R, B, ...] and
multiplies replica by replica. In training, as in prediction, each example uses one draw from the posterior. Without
positions, the pre-activations are drawn instead of the weights (local reparameterisation):

    y = x W + b + eps * sqrt(x^2 var(W) + var(b)),   eps ~ N(0, 1)

If an example has positions (a convolution, a linear layer along a sequence), all of them share its weights. The batch
has one eps, and each example flips its signs: those of inputs by s and those of outputs by r (flipout, Wen et al.,
2018). Each example's weights are then exactly Gaussian, and uncorrelated with those of other examples.

    y = x W + b + r * ((s * x) (eps * sqrt(var(W)))),   r, s = +1 or -1,   b drawn for each example

If a weight affects only a few numbers of an example (an embedding, the scale of a norm), the weight itself is drawn
separately for each example. This is exact, and has less variance than one draw per batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evcl._core.errors import EvclError, NoWeight
from evcl._core.randomness import Noise
from evcl.nn.initial import he_std, he_uniform

if TYPE_CHECKING:
    from evcl.nn.per_task import Mixture, TaskRows
    from evcl.nn.winners import Gate

EXAMPLE_GRADIENT_NUMBERS = 8_000_000  # of per-example gradients or patches held at once: 32 MB in float32
MORE_ON_GPU = 8  # times as many on a GPU, where each piece costs the time of its kernels


def examples_at_once(numbers: int, x: Tensor) -> int:
    """How many examples may be held at once that need this many numbers each, on the device of x."""
    return max(1, (MORE_ON_GPU if x.is_cuda else 1) * EXAMPLE_GRADIENT_NUMBERS // numbers)


class Grads(NamedTuple):
    """Gradients by name, views of flat buffers.

    `variance` holds twice the gradient: with v = sigma^2, d/d log sigma = 2 v d/dv.
    """

    mean: dict[str, Tensor]
    variance: dict[str, Tensor] | None


Product = Callable[[Tensor, Tensor], Tensor]  # (inputs, weight) -> outputs


class Flips(NamedTuple):
    """A draw of the weights per example: the shared `spread`, with signs flipped by the example's `ins` and `outs`."""

    spread: Tensor  # [R, *shape]: deviation of one draw of the weights from their means
    ins: Tensor  # [R, B, i], 1 or -1
    outs: Tensor  # [R, B, o], 1 or -1


class Named(dict[str, Tensor]):
    """Tensors by name, each of them made when it is first asked for."""

    def __init__(self, make: Callable[[str], Tensor]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, name: str) -> Tensor:
        self[name] = value = self.make(name)
        return value

    def of(self, rows: Sequence[int] | Tensor | slice) -> Named:
        """Those of some replicas."""
        subset = Named(lambda name: self[name][rows])
        subset.update({name: value[rows] for name, value in self.items()})
        return subset


class Weights:
    """The weights that the layers of one network currently compute with; all layers share this object."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.rows: Sequence[int] | Tensor | slice | None = None  # which replicas are bound; None: all of them
        self.lane: int | None = None  # which of the bound replicas runs alone; None: all of them run at once
        self.batch = 0  # R*B, the number of rows in the current forward pass
        self.passes = 0  # the number of forward passes so far: a draw may serve one of them
        self.recorded = False  # each layer's inputs and outputs are noted, for gradients of single examples
        self.mapped = False  # inside torch.func.vmap over examples: layers must use operations that it knows
        self.mean = Named(dict[str, Tensor]().__getitem__)  # name -> [R, *shape]: means, or drawn weights
        self.variance: Named | None = None  # None: the weights are `mean`, without a draw
        self.noise: Noise | None = None  # None: not training, so no dropout and no draws
        self.grads: Grads | None = None  # where a training step adds the gradients; None: autograd returns them
        self.task_rows: TaskRows | None = None  # weights that belong to a task; None: there are none
        self.task: int | Mixture | None = None  # whose rows are used; None: those of no task
        self.gate: Gate | None = None  # what k-winners report to in a step of training; None: nothing
        self.compute_dtype: torch.dtype | None = None  # dtype of matrix products in training; None: that of the weights

    def dtype_of(self, x: Tensor) -> torch.dtype:
        """The dtype in which a layer computes with its input x."""
        return x.dtype if self.compute_dtype is None or self.noise is None else self.compute_dtype

    @contextmanager
    def restored(self) -> Iterator[None]:
        """After this context, compute as before."""
        before = dict(vars(self))
        try:
            yield
        finally:
            vars(self).update(before)

    @contextmanager
    def one(self, r: int) -> Iterator[None]:
        """Inside this context, compute with replica r alone, out of those bound."""
        if self.gate is not None:
            raise EvclError("k-winners and weights used outside layers: train one seed at a time")
        row = slice(r, r + 1)
        with self.restored():
            self.rows = row if self.rows is None else self.rows[row]  # type: ignore[index]
            self.lane, self.replicas, self.batch = r, 1, self.batch // self.replicas
            if self.grads is not None:
                mean, variance = ({k: v[row] for k, v in (some or {}).items()} for some in self.grads)
                self.grads = Grads(mean, None if self.grads.variance is None else variance)
            self.narrow(row, torch.tensor([r]))
            yield

    def narrow(self, rows: Tensor | slice, numbers: Tensor) -> None:
        """From now on, use the weights and noise of these of the bound replicas, whose `numbers` are the same."""
        self.mean = self.mean.of(rows)
        self.variance = None if self.variance is None else self.variance.of(rows)
        self.noise = None if self.noise is None else self.noise.of(numbers)
        self.task_rows = None if self.task_rows is None else self.task_rows.of(rows)
        if self.task is not None and not isinstance(self.task, int):
            self.task = self.task.of(rows)


class BayesianLayer(nn.Module):
    """A layer whose weights are named entries of the posterior.

    For a layer of your own, subclass this, construct it from the plain layer, and add it with `evcl.nn.register`. It
    needs `forward`. Methods that use the Fisher also need `example_gradient`, and `neighbours` for `fisher_spread`.
    Kronecker factors are optional: `output_axis`, `input_factor` and `output_rows`.
    Non-persistent buffers [R, ...] hold the layer's state beside its weights, one row per replica: they are saved,
    loaded and moved with the run.
    """

    weights: Weights
    names: dict[str, str]  # the plain layer's parameter -> its name in the posterior
    path: str = ""  # name of the plain layer in the module
    fold: int = 1  # rows per example at this layer: more than 1 if positions were folded into the batch
    batched = True  # whether its input is a batch; a parametrisation's is a weight
    output_axis: int | None = None  # axis of the weight's outputs; None: its Fisher has no Kronecker factors
    random = True  # whether initial weights are drawn; otherwise they are the module's own

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.names = {}
        self.rows: dict[str, slice] = {}  # for a parameter that is a slice of the named one, along its first axis
        self.pieces = 1  # number of layers of equal size that a parameter holds, stacked along its first axis
        self.own = dict(layer.named_parameters(recurse=False))  # the plain parameters, until their names are known

    def initial(self, parameter: str, source: torch.Generator) -> Tensor:
        """An initial mean: He-uniform, or the module's own value."""
        own = self.own[parameter]
        return he_uniform(own.shape, self.fan_in(parameter), source) if self.random else own.detach()

    def redrawn(self, mean: Tensor, scale: float, source: torch.Generator) -> Tensor:
        """Draw a mean of this shape again, from the distribution of its initial values, or return it unchanged."""
        return he_uniform(mean.shape, 2 / scale**2, source) if self.random else mean

    def fan_in(self, parameter: str) -> int:
        """The number of weights that an output of the layer sums over."""
        return prod(self.own["weight"].shape[1:]) if "weight" in self.own else self.own[parameter].numel()

    def scale(self, parameter: str) -> float:
        """The standard deviation of initial weights: that of He's distribution."""
        return he_std(self.fan_in(parameter))

    def centre(self, parameter: str) -> Tensor:
        """The mean of the first prior."""
        return torch.zeros_like(self.own[parameter])

    def begin(self) -> None:
        """Called when a task begins."""

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            raise NoWeight(self, name, self.path, "call the layer, or a layer tied to it")
        return super().__getattr__(name)

    def part(self, named: dict[str, Tensor] | None, parameter: str) -> Tensor | None:
        """This layer's part of the named tensors, [R, *shape]; None if it has no such parameter (such as no bias)."""
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
        """Rows per example in x [R*B, ...]: more than 1 if positions were folded into the batch."""
        return self.fold if len(x) == self.fold * self.weights.batch else 1

    def normal(self, like: Tensor, *shape: int, shared: bool = False) -> Tensor:
        """Noise [R, *shape] from the run's source: [R, B, ...], or without an example axis if `shared` by the batch."""
        if self.weights.noise is None:
            raise RuntimeError("a draw needs a noise source")
        source = self.weights.noise.shared() if shared else self.weights.noise
        return source.normal_(like.new_empty(self.weights.replicas, *shape))

    def draw(self, mean: Tensor, variance: Tensor) -> Tensor:
        """mean + eps * sqrt(variance), both [R*B, ...]."""
        noise = self.normal(mean, mean.shape[0] // self.weights.replicas, *mean.shape[1:]).view_as(mean)
        # An input of zeros to a layer without bias has variance 0, where the derivative of sqrt is infinite.
        return torch.addcmul(mean, noise, variance.clamp_min(1e-30).sqrt())

    def drawn(self, parameter: str, times: int, shared: bool = False) -> Tensor | None:
        """`times` draws of the weights, [R, times, *shape]; for point weights, [R, 1, *shape].

        Each example gets its own: `times` is the number of examples, or a multiple of it if examples have several rows.
        With `shared`, the whole batch uses all `times` draws.
        """
        mean, variance = self.mean(parameter), self.variance(parameter)
        if mean is None or variance is None:
            return None if mean is None else mean.unsqueeze(1)
        noise = self.normal(mean, times, *mean.shape[1:], shared=shared)
        return torch.addcmul(mean.unsqueeze(1), noise, variance.clamp_min(1e-30).sqrt().unsqueeze(1))

    def flips(self, examples: int, ins: int) -> Flips:
        """A draw of the weights [R, o, ...] for each of `examples` examples with `ins` inputs."""
        variance = self.variance("weight")
        assert variance is not None
        spread = self.normal(variance, *variance.shape[1:], shared=True) * variance.clamp_min(1e-30).sqrt()
        sizes = ins, variance.shape[1]
        signs = variance.new_ones(()).copysign(self.normal(variance, examples, sum(sizes)))
        return Flips(spread, *signs.split(sizes, 2))

    def watched(self, x: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """What `example_gradient` needs of a call, [R*B, ...] each: x, and a tensor whose gradient is delta.
        By default, these are the layer's input and output. If others, `forward` prepares them if `weights.recorded`.
        """
        return x, output

    def example_gradient(self, parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        """Per-example gradients [R, B, *shape] from the layer's input x and output gradient delta, both [R, B, ...]."""
        raise EvclError(f"{type(self).__name__} has no example_gradient, which the Fisher needs: add one")

    def rows_at_once(self, parameter: str, x: Tensor, delta: Tensor) -> int:
        """The number of per-example gradients that may be held in memory at once."""
        return examples_at_once(prod(self.weights.mean[self.names[parameter]].shape), x)

    def sum_of(self, of: Callable[[Tensor], Tensor], parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        """[R, *shape]: sum_b of(example b's gradient), computed in pieces because per-example gradients are large.

        `of` is `torch.square` or `torch.abs`; both satisfy of(a b) = of(a) of(b).
        """
        rows = self.rows_at_once(parameter, x, delta)
        pieces = zip(x.split(rows, 1), delta.split(rows, 1), strict=True)
        return reduce(Tensor.add_, (of(self.example_gradient(parameter, xs, ds)).sum(1) for xs, ds in pieces))

    def neighbours(self, parameter: str, importance: Tensor, learned: bool) -> Tensor:
        """For each weight, the mean `importance` of the weights from the same input plus, if the layer's inputs are
        `learned`, that of the weights into the same unit; broadcastable to [R, *shape]. 0 for a layer without units.
        """
        return importance.new_zeros(())

    def input_factor(self, x: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
        """For a layer with an `output_axis`: sum a a^T over the rows and positions of its inputs x [R, B, ...], and
        their number [R]. The sum is [R, i, i], or [R, i] if it is diagonal. With `bias`, a = [inputs; 1].
        """
        raise NotImplementedError

    def output_rows(self, x: Tensor, delta: Tensor) -> Tensor:
        """For a layer with an `output_axis`: its output gradients as rows, [R, m, o]."""
        raise NotImplementedError


def state_of(layer: nn.Module) -> dict[str, Tensor]:
    """The layer's state beside its weights, one row per replica."""
    transient = layer._non_persistent_buffers_set
    return {key: buffer for key, buffer in layer.named_buffers(recurse=False) if key in transient}


def along(weight: Tensor, axes: int, channels: bool) -> Tensor:
    """[..., units] with axes of length 1 up to this many: before the units, or after them if they are channels."""
    more = [1] * (axes - weight.dim())
    return weight.view(*weight.shape, *more) if channels else weight.view(*weight.shape[:-1], *more, weight.shape[-1])


def of_units(importance: Tensor, learned: bool) -> Tensor:
    """`neighbours` for weights [R, o, ...], with outputs along axis 1, or for biases [R, o], whose input is 1."""
    alone = importance.shape[1] == 1  # with one output, no other weight has the same input
    mean = importance.new_zeros(()) if alone else importance.mean(1, keepdim=True)
    if learned and importance.dim() > 2:
        mean = mean + importance.mean(list(range(2, importance.dim())), keepdim=True)
    return mean


def outer_sum(rows: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
    """sum a a^T over rows a [R, m, i], with a 1 appended to each if `bias`; and m as [R]."""
    rows = F.pad(rows, (0, 1), value=1.0) if bias else rows
    return rows.mT @ rows, rows.new_full((len(rows),), rows.shape[1])


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[R, B, i] x [R, o, i] + [R, o] -> [R, B, o]"""
    if x.shape[0] == 1:  # squeeze instead of [0], whose backward pass copies into a tensor of zeros
        return F.linear(x.squeeze(0), weight.squeeze(0), None if bias is None else bias.squeeze(0)).unsqueeze(0)
    if bias is None:
        return torch.bmm(x, weight.mT)
    return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a b, all [R, ., .], in place; a and b may have lower precision."""
    if a.dtype != out.dtype:
        out += torch.matmul(a, b)
    elif out.shape[0] == 1:
        out.squeeze(0).addmm_(a.squeeze(0), b.squeeze(0))
    else:
        out.baddbmm_(a, b)


def along_positions(
    layer: BayesianLayer, x: Tensor, sizes: tuple[int, int], apply: Product, wide: Callable[[Tensor], Tensor]
) -> Tensor:
    """The output for x if all positions of an example share its draw of the weights. `sizes`: examples, and inputs.
    `apply` a weight, without bias; `wide` gives a number per unit of an example to all its positions.
    """
    weight = layer.mean("weight")
    assert weight is not None
    spread, ins, outs = layer.flips(*sizes)
    y = torch.addcmul(apply(x, weight), apply(x * wide(ins), spread), wide(outs))
    bias = layer.drawn("bias", sizes[0])
    return y if bias is None else y.add_(wide(bias))


class LocalDraw(torch.autograd.Function):
    """y = x W + b + eps s,  s = sqrt(x^2 var(W) + var(b)),  on [R, B, i]; without variances y = x W + b.

    Written by hand because this makes half as many passes over memory as autograd, and adds each weight's gradient
    directly to the flat buffers that the update reads:

        dW += g^T x    db += sum g    2 dvar(W) += h^T x^2    2 dvar(b) += sum h    dx = g W + x (h var(W))

    with g the gradient of y, and h = g eps / s. The layers' tests compare it with autograd on `Linear.forward`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        *parts, noise, ctx.grads, compute_dtype = rest
        full = parts[0].dtype
        inputs = [x, *parts, None if noise is None else x.square()]
        if compute_dtype is not None:  # matrix products in this precision, everything else in that of the weights
            inputs = [None if t is None else t.to(compute_dtype) for t in inputs]
        x, weight, bias, var_weight, var_bias, x2 = inputs
        y = product(x, weight, bias)
        if noise is None:
            ctx.save_for_backward(x, weight)
            return y.to(full, copy=True)  # not a view, because an in-place activation may follow
        std = product(x2, var_weight, var_bias).to(full).clamp_(min=1e-30).sqrt_()
        ctx.save_for_backward(x, weight, x2, var_weight, noise, std)
        return torch.addcmul(y.to(full), noise, std)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *drawn = ctx.saved_tensors
        grad_weight, grad_bias, grad_var_weight, grad_var_bias = ctx.grads
        cast = g.to(x.dtype)
        add_product(grad_weight, cast.mT, x)
        if grad_bias is not None:
            grad_bias += g.sum(1)
        dx = torch.matmul(cast, weight).to(g.dtype) if ctx.needs_input_grad[0] else None
        if drawn:
            x2, var_weight, noise, std = drawn
            h = torch.mul(g, noise).div_(std)
            cast = h.to(x.dtype)
            add_product(grad_var_weight, cast.mT, x2)
            if grad_var_bias is not None:
                grad_var_bias += h.sum(1)
            if dx is not None:
                dx.addcmul_(x.to(g.dtype), torch.matmul(cast, var_weight).to(g.dtype))
        return dx, None, None, None, None, None, None, None


local_draw: Callable[..., Tensor] = LocalDraw.apply
