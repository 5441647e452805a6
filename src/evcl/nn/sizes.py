"""How many examples may go through a network at once: as many as the memory of their activations allows.

The inputs do not tell: a small image may become hundreds of feature maps. So the numbers that a pass makes are counted,
once per network and shape of the inputs, with one example and with two; the difference is what an example needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PASS_NUMBERS = 2**22  # in the largest activation of a forward pass: 16 MB in float32, about what a cache holds
KEPT_NUMBERS = 2**27  # in all activations of a pass that keeps them for a backward pass: 512 MB in float32
# On a GPU this many times as many, in a forward pass and in one that keeps them, and for each replica as many: small
# passes cost more time there, and training holds the activations of all replicas too.
ON_GPU = 8, 2
MOST_ROWS = 4096  # in a forward pass, however small they are


class Size(NamedTuple):
    """The numbers that one example adds to the largest tensor of a pass, and to all of them together."""

    largest: int
    total: int

    def forward_rows(self, on_gpu: bool, replicas: int = 1) -> int:
        """How many examples may go through a forward pass at once, counted over all replicas."""
        more = ON_GPU[0] * replicas if on_gpu else 1
        return min(MOST_ROWS * (replicas if on_gpu else 1), max(1, more * PASS_NUMBERS // max(1, self.largest)))

    def backward_rows(self, on_gpu: bool, replicas: int = 1) -> int:
        """How many examples may go through a pass at once whose activations are kept, counted over all replicas."""
        return max(1, (ON_GPU[1] * replicas if on_gpu else 1) * KEPT_NUMBERS // max(1, self.total))


class _Counted(TorchDispatchMode):
    """Counts the numbers of each new tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[int] = []

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        given, made = ([t for t in tree_leaves(some) if isinstance(t, Tensor)] for some in ((args, kwargs), out))
        known = {t.untyped_storage().data_ptr() for t in given}
        self.found += [t.numel() for t in made if t.untyped_storage().data_ptr() not in known]
        return out


@torch.no_grad()
def measured(run: Callable[[Tensor], object], x: Tensor) -> Size:
    """The size of `run`, which passes examples such as x [n, ...] through a network."""
    counts = []
    for examples in (1, 2):
        rows = x[torch.arange(examples) % len(x)]
        with _Counted() as counted:
            run(rows)
        counts.append(counted.found)
    one, two = counts
    if len(one) != len(two):  # it does other things with two examples: the mean of both
        return Size(max(two, default=0) // 2, sum(two) // 2)
    each = [b - a for a, b in zip(one, two, strict=True)]
    return Size(max(each, default=0), max(0, sum(each)))
