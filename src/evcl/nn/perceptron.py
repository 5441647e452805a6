"""The paper's trunk: a multilayer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from evcl._core.errors import EvclError
from evcl.nn.posterior import he_uniform

MOST_LAYERS, MOST_WEIGHTS = 100, 10**9


class MLP(nn.Sequential):
    """Linear layers, each followed by a ReLU. A learner draws the weights again from its own seed."""

    def __init__(self, inputs: int, hidden: Sequence[int], seed: int = 0) -> None:
        widths = [inputs, *hidden]
        if len(widths) < 2 or any(isinstance(w, bool) or not isinstance(w, int) or w < 1 for w in widths):
            raise EvclError(
                f"mlp takes a width and a list of hidden widths, all at least 1, not {inputs!r}, {hidden!r}"
            )
        weights = sum((a + 1) * b for a, b in pairwise(widths))
        if len(hidden) > MOST_LAYERS or weights > MOST_WEIGHTS:
            raise EvclError(
                f"an mlp of {len(hidden)} hidden layers and {weights:,} weights is too large: "
                f"the limits are {MOST_LAYERS} layers and {MOST_WEIGHTS:,} weights"
            )
        source = torch.Generator().manual_seed(seed)
        layers: list[nn.Module] = [nn.Flatten()]
        for fan_in, fan_out in pairwise(widths):
            layer = skip_init(nn.Linear, fan_in, fan_out)  # its default initialisation uses the global generator
            for parameter in (layer.weight, layer.bias):
                parameter.data.copy_(he_uniform(parameter.shape, fan_in, source))
            layers += [layer, nn.ReLU()]
        super().__init__(*layers)
        self.inputs, self.hidden = inputs, tuple(hidden)

    def forward(self, x: Tensor) -> Tensor:
        width = x[0].numel()
        if width != self.inputs:
            raise EvclError(f"the network takes {self.inputs} numbers per example, not {width}")
        for layer in self:
            x = layer(x)
        return x


def mlp(inputs: int, hidden: Sequence[int]) -> MLP:
    """A trunk of fully connected ReLU layers: `mlp(784, [256, 256])`. Images are flattened."""
    return MLP(inputs, hidden)
