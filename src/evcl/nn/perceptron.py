"""The paper's trunk: a multilayer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from evcl._core.bounds import MOST_LAYERS, MOST_WEIGHTS
from evcl._core.errors import EvclError
from evcl.nn.initial import he_layer


class MLP(nn.Sequential):
    """Linear layers, each followed by a ReLU and, if wanted, dropout. A learner draws the weights from its own seed."""

    def __init__(
        self, inputs: int, hidden: Sequence[int], seed: int = 0, dropout: float = 0.0, input_dropout: float = 0.0
    ) -> None:
        widths = [inputs, *hidden]
        if any(isinstance(w, bool) or not isinstance(w, int) or w < 1 for w in widths):
            raise EvclError(
                f"mlp takes a width and a list of hidden widths, all at least 1, not {inputs!r}, {hidden!r}"
            )
        for name, p in (("dropout", dropout), ("input_dropout", input_dropout)):
            if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p < 1:
                raise EvclError(f"{name} must be a number of at least 0 and below 1, not {p!r}")
        weights = sum((a + 1) * b for a, b in pairwise(widths))
        if len(hidden) > MOST_LAYERS or weights > MOST_WEIGHTS:
            raise EvclError(
                f"an mlp of {len(hidden)} hidden layers and {weights:,} weights is too large: "
                f"the limits are {MOST_LAYERS} layers and {MOST_WEIGHTS:,} weights"
            )
        source = torch.Generator().manual_seed(seed)
        layers: list[nn.Module] = [nn.Flatten()]
        if input_dropout:
            layers.append(nn.Dropout(input_dropout))
        for fan_in, fan_out in pairwise(widths):
            layers += [he_layer(source, nn.Linear, fan_in, fan_out), nn.ReLU()]
            layers += [nn.Dropout(dropout)] if dropout else []
        super().__init__(*layers)
        self.inputs, self.hidden = inputs, tuple(hidden)
        self.dropout, self.input_dropout = float(dropout), float(input_dropout)

    def described(self) -> dict[str, object]:
        """The arguments that make an MLP of this shape, as JSON; dropout only if there is any."""
        dropped = {"dropout": self.dropout, "input_dropout": self.input_dropout}
        return {"inputs": self.inputs, "hidden": list(self.hidden), **{name: p for name, p in dropped.items() if p}}

    def forward(self, x: Tensor) -> Tensor:
        width = x[0].numel()
        if width != self.inputs:
            raise EvclError(f"the network takes {self.inputs} numbers per example, not {width}")
        for layer in self:
            x = layer(x)
        return x


def mlp(inputs: int, hidden: Sequence[int], dropout: float = 0.0, input_dropout: float = 0.0) -> MLP:
    """A trunk of fully connected ReLU layers: `mlp(784, [256, 256])`. Images are flattened. Without hidden layers,
    `mlp(784, [])`, the heads alone learn: a linear model.

    In training, but not in predictions, each hidden unit is dropped with probability `dropout`, and each input with
    `input_dropout`; the others are scaled up so that their means stay the same.
    """
    return MLP(inputs, hidden, dropout=dropout, input_dropout=input_dropout)
