"""Bayesian forms of the most common layers: linear, convolution, embedding, dropout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evcl._core.errors import EvclError
from evcl.nn.layer import BayesianLayer, along_positions, examples_at_once, local_draw, of_units, outer_sum, product


class Linear(BayesianLayer):
    """nn.Linear on [R*B, i] or, along a sequence, [R*B, ..., i]."""

    output_axis: int | None = 0

    def forward(self, x: Tensor) -> Tensor:
        flat = self.unfold(x).flatten(1, -2) if x.dim() > 2 else self.unfold(x)
        weight, bias = self.mean("weight"), self.mean("bias")
        assert weight is not None
        shape = (*x.shape[:-1], weight.shape[1])
        positions = self.rows_each(x) * prod(x.shape[1:-1])
        dtype = self.weights.dtype_of(flat)
        if positions > 1 and self.weights.variance is not None:
            each = flat.to(dtype).unflatten(1, (-1, positions))  # [R, B, t, i]

            def multiplied(x: Tensor, weight: Tensor) -> Tensor:
                y: Tensor = product(x.flatten(1, 2), weight.to(dtype), None).unflatten(1, each.shape[1:3])
                return y

            sizes = each.shape[1], each.shape[3]
            return along_positions(self, each, sizes, multiplied, lambda t: t.to(dtype).unsqueeze(2)).view(shape)
        if positions > 1 and dtype != weight.dtype:
            return product(flat.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)).view(shape)
        flat = flat.to(weight.dtype)
        if self.weights.grads is not None:
            return self._train(flat, weight, bias).view(shape)
        mean = product(flat, weight, bias)
        variance_weight = self.variance("weight")
        if variance_weight is None:
            return mean.view(shape)
        variance = product(flat.square(), variance_weight, self.variance("bias"))
        return self.draw(mean.view(shape), variance.view(shape))

    def _train(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same output, with gradients added directly to the flat buffers."""
        grads, noise = self.weights.grads, None
        assert grads is not None
        if self.weights.variance is not None:
            noise = self.normal(weight, x.shape[1], weight.shape[1])
        into = tuple(self.part(named, p) for named in grads for p in ("weight", "bias"))
        variances = self.variance("weight"), self.variance("bias")
        out: Tensor = local_draw(x, weight, bias, *variances, noise, into, self.weights.compute_dtype)
        return out

    def example_gradient(self, parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        if parameter == "bias":
            return delta.flatten(2, -2).sum(2) if delta.dim() > 3 else delta
        if delta.dim() == 3:
            return delta.unsqueeze(-1) * x.unsqueeze(-2)
        return delta.flatten(2, -2).mT @ x.flatten(2, -2)

    def neighbours(self, parameter: str, importance: Tensor, learned: bool) -> Tensor:
        return of_units(importance, learned)

    def sum_of(self, of: Callable[[Tensor], Tensor], parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        """Without positions, sum_b (d_b x_b)^2 = (d^2)^T (x^2), one matrix product; so with absolute values."""
        if delta.dim() > 3:
            return super().sum_of(of, parameter, x, delta)
        if parameter == "bias":
            return of(delta).sum(1)
        return torch.bmm(of(delta).mT, of(x))

    def input_factor(self, x: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
        return outer_sum(x.flatten(1, -2), bias)

    def output_rows(self, x: Tensor, delta: Tensor) -> Tensor:
        return delta.flatten(1, -2)


class TransposedLinear(Linear):
    """A linear layer whose weight is [i, o]: `Conv1D` of the transformers package, which GPT-2 uses."""

    output_axis = None

    def part(self, named: dict[str, Tensor] | None, parameter: str) -> Tensor | None:
        """The weight as [R, o, i], as `Linear` has it."""
        value = super().part(named, parameter)
        return value.mT if value is not None and parameter == "weight" else value

    def fan_in(self, parameter: str) -> int:
        return self.own["weight"].shape[0]

    def neighbours(self, parameter: str, importance: Tensor, learned: bool) -> Tensor:
        return of_units(importance.mT, learned).mT if parameter == "weight" else of_units(importance, learned)


class Conv(BayesianLayer):
    """nn.Conv1d and nn.Conv2d, with stride, every kind of padding, dilation and groups."""

    def __init__(self, layer: nn.Conv1d | nn.Conv2d) -> None:
        super().__init__(layer)
        self.stride, self.dilation, self.groups = layer.stride, layer.dilation, layer.groups
        self.kernel = layer.kernel_size
        self.output_axis = 0 if self.groups == 1 else None
        self.pad_mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        if layer.padding == "same":
            whole = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        else:
            whole = [0] * len(layer.kernel_size) if layer.padding == "valid" else [2 * int(p) for p in layer.padding]
        # (left, right, top, bottom), the order that F.pad expects: last axis first
        self.pad = tuple(side for n in reversed(whole) for side in (n // 2, n - n // 2))
        self.padding = (0,) * len(self.kernel)
        if self.pad_mode == "constant" and self.pad[::2] == self.pad[1::2]:  # the convolution pads faster itself
            self.padding, self.pad = self.pad[::-2], ()

    def forward(self, x: Tensor) -> Tensor:
        rank = len(self.kernel)
        if x.dim() != rank + 2:
            wanted = ", ".join(("height", "width")[2 - rank :])
            raise EvclError(f"Conv{rank}d takes [batch, channels, {wanted}], not shape {tuple(x.shape)}")
        rows = self.rows_each(x)
        x = F.pad(x, self.pad, mode=self.pad_mode) if any(self.pad) else x
        x = x.to(self.weights.dtype_of(x))
        if x.is_cuda and rank == 2:  # the order in which a GPU's matrix units read images
            x = x.contiguous(memory_format=torch.channels_last)
        if self.weights.variance is None:
            weight = self.mean("weight")
            assert weight is not None
            return self._convolve(x, weight, self.mean("bias"))

        def wide(each: Tensor) -> Tensor:
            """[R, B, c] -> [R*B, c, 1, 1]: repeat for all rows and positions of an example."""
            repeated = each.unsqueeze(2).expand(-1, -1, rows, -1).reshape(len(x), -1).to(x.dtype)
            return repeated.view(*repeated.shape, *[1] * rank)

        sizes = len(x) // (rows * self.weights.replicas), x.shape[1]
        return along_positions(self, x, sizes, self._convolve, wide)

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Convolve x [R*B, c, h, w]: on a GPU replica by replica; on a CPU with replicas as the groups of one
        convolution over [B, R*c, h, w].
        """
        r = weight.shape[0]
        convolution: Callable[..., Tensor] = F.conv1d if len(self.kernel) == 1 else F.conv2d
        how = self.stride, self.padding, self.dilation
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        if r > 1 and x.is_cuda:
            shifts: Sequence[Tensor | None] = [None] * r if bias is None else list(bias)
            parts = zip(x.chunk(r), weight, shifts, strict=True)
            return torch.cat([convolution(part, w, b, *how, self.groups) for part, w, b in parts])
        if r > 1:
            x = self.unfold(x).transpose(0, 1).flatten(1, 2)
        y = convolution(x, weight.flatten(0, 1), None if bias is None else bias.flatten(), *how, r * self.groups)
        return y if r == 1 else y.unflatten(1, (r, -1)).transpose(0, 1).flatten(0, 1)

    def neighbours(self, parameter: str, importance: Tensor, learned: bool) -> Tensor:
        """Weights are treated group by group, because each group has its own inputs. All biases share the input 1."""
        if parameter == "bias":
            return of_units(importance, learned)
        groups = importance.unflatten(1, (self.groups, -1)).flatten(0, 1)
        return of_units(groups, learned).expand_as(groups).reshape(importance.shape)

    def rows_at_once(self, parameter: str, x: Tensor, delta: Tensor) -> int:
        """Fewer than in other layers, because the unfolded patches [R, B, c*k, l] are larger than the gradients."""
        patches = x.shape[0] * x.shape[2] * prod(self.kernel) * prod(delta.shape[3:])
        return min(super().rows_at_once(parameter, x, delta), examples_at_once(patches, x))

    def example_gradient(self, parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        """The matrix product over the positions of each example: [R, B, o, l] x [R, B, l, i*k] per group."""
        if parameter == "bias":
            return delta.flatten(3).sum(3)
        r, b = x.shape[:2]
        patches = self._patches(x).unflatten(1, (self.groups, -1))  # [R*B, g, c/g*k, l]
        delta = delta.flatten(0, 1).flatten(2).unflatten(1, (self.groups, -1))  # [R*B, g, o/g, l]
        shape = self.weights.mean[self.names[parameter]].shape[1:]
        gradient: Tensor = delta @ patches.mT
        return gradient.reshape(r, b, *shape)

    def _patches(self, x: Tensor) -> Tensor:
        """[R*B, c*k, l]: what each of the l positions of the output sees of x [R, B, c, ...]."""
        x = x.flatten(0, 1)
        x = F.pad(x, self.pad, mode=self.pad_mode) if any(self.pad) else x
        x = F.pad(x, [side for p in reversed(self.padding) for side in (p, p)]) if any(self.padding) else x
        for axis, (k, d, s) in enumerate(zip(self.kernel, self.dilation, self.stride, strict=True), 2):
            x = x.unfold(axis, (k - 1) * d + 1, s)[..., ::d]
        sizes, rank = x.shape[2 : 2 + len(self.kernel)], len(self.kernel)
        # A view [R*B, c, *k, *l] that is copied at once: on a GPU, F.unfold copies image by image
        return x.movedim(tuple(range(2, 2 + rank)), tuple(range(-rank, 0))).reshape(len(x), -1, prod(sizes))

    def input_factor(self, x: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
        """The rows are patches, one per position of the output."""
        whole = x.shape[0] * prod(self.kernel) * prod(x.shape[2:])  # numbers in the patches of one example, at most
        patches = (self._patches(part).mT for part in x.split(examples_at_once(whole, x), 1))  # [R*B, l, c*k]
        each = (outer_sum(rows.reshape(len(x), -1, rows.shape[2]), bias) for rows in patches)
        return reduce(lambda total, more: (total[0].add_(more[0]), total[1] + more[1]), each)

    def output_rows(self, x: Tensor, delta: Tensor) -> Tensor:
        return delta.flatten(3).mT.flatten(1, 2)


class Embedding(BayesianLayer):
    """nn.Embedding on indices [R*B] or [R*B, ...], of any numeric type.

    In training, each example has one draw of each row it uses, however often it uses it. The row of `padding_idx` is
    not a weight: it keeps the plain layer's values.
    """

    padding: Tensor
    output_axis = 1

    def __init__(self, layer: nn.Embedding) -> None:
        super().__init__(layer)
        if layer.max_norm is not None or layer.scale_grad_by_freq:
            raise EvclError("an Embedding with max_norm or scale_grad_by_freq has no Bayesian form: leave them out")
        self.size, self.padding_idx = layer.num_embeddings, layer.padding_idx
        if self.padding_idx is not None:
            self.register_buffer("padding", layer.weight.detach()[self.padding_idx].clone())

    def initial(self, parameter: str, source: torch.Generator) -> Tensor:
        return self._with_padding(super().initial(parameter, source))

    def redrawn(self, mean: Tensor, scale: float, source: torch.Generator) -> Tensor:
        return self._with_padding(super().redrawn(mean, scale, source))

    def centre(self, parameter: str) -> Tensor:
        """The mean of the first prior; for the padding row, its present values, so that it never moves."""
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
        """[R, B, t, d]: one look-up per replica, so that too large an index does not read another replica's row."""
        table = self.part(getattr(self.weights, what), "weight")
        if table is None:
            return None
        try:
            return torch.stack([F.embedding(i, rows) for i, rows in zip(index, table, strict=True)])
        except IndexError:
            raise EvclError(f"{self.path!r} (Embedding) got an index outside its rows 0 to {self.size - 1}") from None

    def neighbours(self, parameter: str, importance: Tensor, learned: bool) -> Tensor:
        """The weights from one input are a row; its input is an index, which is not learned."""
        return importance.mean(2, keepdim=True)

    def sum_of(self, of: Callable[[Tensor], Tensor], parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        """Sum the gradients of a row over the positions that use it, at the first of them, and apply `of` there."""
        index, delta = self._positions(x, delta)
        leaders = _leaders(index).unsqueeze(-1).expand_as(delta)
        squares = of(torch.zeros_like(delta).scatter_add_(2, leaders, delta))
        total = delta.new_zeros(len(index), self.size, delta.shape[-1])
        places = index.flatten(1).unsqueeze(-1).expand(-1, -1, delta.shape[-1])
        return total.scatter_add_(1, places, squares.flatten(1, 2))

    def example_gradient(self, parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        index, delta = self._positions(x, delta)
        gradient = delta.new_zeros(*index.shape[:2], self.size, delta.shape[-1])
        return gradient.scatter_add_(2, index.unsqueeze(-1).expand_as(delta), delta)

    def input_factor(self, x: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
        """The input of the layer is 1 for the row of an index and 0 for all others, so that the sum is diagonal: how
        often each row is used. The padding does not count.
        """
        index = x.long().flatten(1)
        used = torch.zeros(len(x), self.size, dtype=self.weights.mean[self.names["weight"]].dtype, device=x.device)
        used.scatter_add_(1, index, used.new_ones(()).expand_as(index))
        if self.padding_idx is not None:
            used[:, self.padding_idx] = 0
        return used, used.sum(1)

    def output_rows(self, x: Tensor, delta: Tensor) -> Tensor:
        return self._positions(x, delta)[1].flatten(1, 2)

    def _positions(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Indices [R, B, t] and gradients [R, B, t, d], which are 0 at the padding."""
        index = x.long().reshape(*x.shape[:2], -1)
        delta = delta.reshape(*index.shape, delta.shape[-1])
        if self.padding_idx is not None:
            delta = delta.masked_fill((index == self.padding_idx).unsqueeze(-1), 0)
        return index, delta


def _leaders(index: Tensor) -> Tensor:
    """[..., t]: for each position, the first position that has the same index, which represents all of them."""
    ordered, order = index.sort(stable=True)
    place = torch.arange(index.shape[-1], device=index.device).expand_as(index)
    first = F.pad(ordered[..., 1:] != ordered[..., :-1], (1, 0), value=True)
    start = torch.where(first, place, 0).cummax(-1).values
    return torch.empty_like(order).scatter_(-1, order, order.gather(-1, start))


class Dropout(BayesianLayer):
    """Dropout and its channel-wise forms, which draw from the run's noise."""

    def __init__(self, layer: nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d, positions: int = 0) -> None:
        super().__init__(layer)
        self.p = layer.p
        self.positions = positions  # number of trailing axes that are dropped together

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
