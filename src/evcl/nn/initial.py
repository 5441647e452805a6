"""The first prior and the first posterior of a network's weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from evcl._core.devices import double
from evcl._core.errors import EvclError
from evcl.posterior import Gaussian, Layout

L = TypeVar("L", bound=nn.Module)


class Prior(NamedTuple):
    """A first prior of your own for `Learner(prior=...)`: Gaussians over the network's weights, by their names.

    Attributes:
        means: name of the parameter -> means, of its shape
        stds: name of the parameter -> standard deviations, of its shape
    """

    means: Mapping[str, Tensor]
    stds: Mapping[str, Tensor]

    def flat(self, layout: Layout, like: Tensor) -> Gaussian:
        """The Gaussian [1, P] over the weights of this layout, all of which it must have; others are left out."""
        rows = like.new_empty(1, layout.size), like.new_empty(1, layout.size)
        for name, shape in layout.shapes.items():
            for flat, given, what in ((rows[0], self.means, "mean"), (rows[1], self.stds, "standard deviation")):
                if name not in given:
                    raise EvclError(f"the prior has no {what} for {name!r}: it must have one for each of the weights")
                value = torch.as_tensor(given[name])
                if tuple(value.shape) != shape:
                    came = tuple(value.shape)
                    raise EvclError(f"the prior's {what} of {name!r} is {came}, but the weight is {shape}")
                layout.view(flat, name).copy_(value.detach())
        if not bool(rows[0].isfinite().all() and rows[1].isfinite().all() and (rows[1] > 0).all()):
            raise EvclError("a prior's means must be finite, and its standard deviations finite and above 0")
        return Gaussian(rows[0], rows[1].log())


def log_stds(
    std: float | Sequence[float] | Tensor | str,
    scales: Mapping[str, float],
    layout: Layout,
    like: Tensor,
    part: float = 1.0,
) -> Tensor:
    """The log of standard deviations. If `std` is numbers, one per replica or one for all, it is [R, 1] or [1, 1]; if
    it is "auto", it is [1, P], from `part` times the scale of each name.
    """
    if not isinstance(std, str):
        wide = double(std) if isinstance(std, Tensor) else torch.tensor(std, dtype=torch.float64)
        return wide.reshape(-1, 1).log().to(like)
    each = torch.tensor([math.log(part * scales[name]) for name in layout.spans], dtype=torch.float64)
    sizes = torch.tensor([span.stop - span.start for span in layout.spans.values()], dtype=torch.long)
    return each.repeat_interleave(sizes).to(like).unsqueeze(0)


def he_std(fan_in: int) -> float:
    """sqrt(2 / fan_in), which makes a unit's output about as large as its inputs, for any number of inputs."""
    return math.sqrt(2 / max(1, fan_in))


def he_uniform(shape: Sequence[int], fan_in: float, source: torch.Generator) -> Tensor:
    """Draw from U(-b, b) with b = sqrt(6 / fan_in), in float64 so that every precision starts from the same draw."""
    bound = math.sqrt(6 / max(1, fan_in))
    return torch.empty(tuple(shape), dtype=torch.float64).uniform_(-bound, bound, generator=source)


def blank(kind: type[L], *sizes: object, **options: object) -> L:
    """A layer with memory for its weights, and anything in it. Its default initialisation would use torch's global
    generator. `torch.nn.utils.skip_init` does the same, but imports sympy, which takes a second.
    """
    layer = kind(*sizes, **options, device="meta")
    for name, weight in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device="cpu")))
    return layer


def he_layer(source: torch.Generator, kind: type[L], *sizes: int, **options: object) -> L:
    """A linear layer or a convolution with He-uniform weights."""
    layer = blank(kind, *sizes, **options)
    fan_in = math.prod(layer.get_parameter("weight").shape[1:])
    for parameter in layer.parameters():
        parameter.data.copy_(he_uniform(parameter.shape, fan_in, source))
    return layer
