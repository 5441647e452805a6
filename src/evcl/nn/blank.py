"""Layers whose weights are yet to be set."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

L = TypeVar("L", bound=nn.Module)


def blank(kind: type[L], *sizes: Any, **options: Any) -> L:
    """A layer with memory for its weights, and anything in it. Its default initialisation would use torch's global
    generator. `torch.nn.utils.skip_init` does the same, but imports sympy, which takes a second.
    """
    layer = kind(*sizes, **options, device="meta")
    for name, weight in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device="cpu")))
    return layer
