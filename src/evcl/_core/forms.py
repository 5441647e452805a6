"""Several inputs in one tensor: `pack` puts them side by side as columns of floating-point numbers, and a `Form` says
how to take them apart again.

The columns of an example are first those of the inputs of one size, then those of each step of the sequences:

    fixed inputs | step 0: ids, mask, ... | step 1: ids, mask, ... | ...

So the length of the sequences follows from the number of columns, and sequences become longer by columns of zeros at
the end. Values of a sequence are stored as differences from its padding value, so that 0 is padding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl._core.errors import EvclError

Key = int | str  # position among the arguments of `forward`, or name
Kind = Literal["float", "int", "bool"]
MASKS = ("attention_mask", "mask")  # made if they are missing: 1 or True for a step that is there


def called(key: Key) -> str:
    return f"input {key}" if isinstance(key, int) else f"input {key!r}"


@dataclass(frozen=True)
class Input:
    """One input of a network: its place among the arguments, and what an example of it looks like.

    Attributes:
        key: its position, or its name
        kind: what the network gets: floating-point numbers, 64-bit integers or truth values
        shape: the shape of an example; for a sequence, of one step
        sequence: whether its first axis is a sequence, whose length may differ from call to call
        pad: the value of steps that are not there
    """

    key: Key
    kind: Kind
    shape: tuple[int, ...]
    sequence: bool = False
    pad: int = 0

    @property
    def width(self) -> int:
        return math.prod(self.shape)

    @property
    def called(self) -> str:
        return called(self.key)


@dataclass(frozen=True)
class Form:
    """How the columns of a packed tensor become the inputs of a network."""

    inputs: tuple[Input, ...]

    @property
    def fixed(self) -> int:
        """The number of columns of inputs that are no sequences."""
        return sum(one.width for one in self.inputs if not one.sequence)

    @property
    def step(self) -> int:
        """The number of columns of one step of the sequences."""
        return sum(one.width for one in self.inputs if one.sequence)

    @property
    def mask(self) -> Input | None:
        """The input that says which steps of a sequence are there, if there is one."""
        return next((one for one in self.inputs if one.key in MASKS and one.sequence), None)

    def unpack(self, x: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The arguments of the network, by position and by name, from packed rows [N, columns]."""
        if x.dim() != 2 or x.shape[1] < self.fixed or (x.shape[1] - self.fixed) % max(1, self.step):
            raise EvclError(f"packed inputs must have {self.fixed} + k * {self.step} columns, not {tuple(x.shape)}")
        steps = x[:, self.fixed :]
        if self.step:
            steps = steps.unflatten(1, (-1, self.step))
        places, arguments = {False: 0, True: 0}, {}
        for one in self.inputs:
            start = places[one.sequence]
            places[one.sequence] = end = start + one.width
            part = (steps if one.sequence else x)[..., start:end].unflatten(-1, one.shape or (1,))
            part = part if one.shape else part.squeeze(-1)
            if one.kind != "float":
                part = part != 0 if one.kind == "bool" else part.long() + one.pad
            arguments[one.key] = part
        order = sorted(key for key in arguments if isinstance(key, int))
        return [arguments[key] for key in order], {key: one for key, one in arguments.items() if isinstance(key, str)}

    def packed(self, inputs: Mapping[Key, Tensor], dtype: torch.dtype) -> Tensor:
        """[N, columns]: the inverse of `unpack`, from tensors that fit."""
        fixed, steps = [], []
        for one in self.inputs:
            part = inputs[one.key]
            part = (part - one.pad if one.kind == "int" else part).to(dtype)
            if one.sequence:
                steps.append(part.reshape(part.shape[0], part.shape[1], one.width))
            else:
                fixed.append(part.reshape(part.shape[0], one.width))
        return torch.cat([*fixed, torch.cat(steps, 2).flatten(1)] if steps else fixed, 1)

    def described(self) -> list[object]:
        """As JSON."""
        return [[one.key, one.kind, list(one.shape), one.sequence, one.pad] for one in self.inputs]

    @classmethod
    def from_description(cls, described: object) -> Form:
        """The inverse of `described`; raises EvclError if it is something else."""
        inputs = []
        each: list[Any] = described if isinstance(described, list) else [None]
        for one in each:
            right = isinstance(one, list) and len(one) == 5 and type(one[0]) in (int, str)
            right = right and one[1] in ("float", "int", "bool") and isinstance(one[2], list) and type(one[3]) is bool
            if not right or not all(type(n) is int and 0 < n < 2**40 for n in one[2]) or type(one[4]) is not int:
                raise EvclError("the form of its inputs cannot be read")
            inputs.append(Input(one[0], one[1], tuple(one[2]), one[3], one[4]))
        positions = sorted(one.key for one in inputs if isinstance(one.key, int))
        if not inputs or positions != list(range(len(positions))) or len({one.key for one in inputs}) != len(inputs):
            raise EvclError("the form of its inputs cannot be read")
        return cls(tuple(inputs))


def widened(x: Tensor, columns: int) -> Tensor:
    """x [..., columns] with zeros up to this many columns: steps of padding at the end of its sequences."""
    return x if x.shape[-1] >= columns else F.pad(x, (0, columns - x.shape[-1]))
