"""Several inputs in one tensor: `pack` puts them side by side as columns of floating-point numbers, and a `Form` says
how to take them apart again.

The columns of an example are first those of the inputs of one size, then those of each step of the sequences:

    fixed inputs | step 0: ids, mask, ... | step 1: ids, mask, ... | ...

So the length of the sequences follows from the number of columns, and sequences become longer by columns of zeros at
the end. Values of a sequence are stored as differences from its padding value, so that 0 is padding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.inputs import numeric

Key = int | str  # position among the arguments of `forward`, or name
Kind = Literal["float", "int", "bool"]
MASKS = ("attention_mask", "mask")  # made if they are missing: 1 or True for a step that is there
EXACT = {torch.float32: 2**24, torch.float64: 2**53}  # the integers up to this size are exact


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
        places, found = {False: 0, True: 0}, {}
        for one in self.inputs:
            start = places[one.sequence]
            places[one.sequence] = end = start + one.width
            part = steps[:, :, start:end].unflatten(2, one.shape or (1,)) if one.sequence else x[:, start:end]
            if not one.sequence:
                part = part.unflatten(1, one.shape or (1,))
            part = part if one.shape else part.squeeze(-1)
            if one.kind != "float":
                part = part != 0 if one.kind == "bool" else part.long() + one.pad
            found[one.key] = part
        order = sorted(key for key in found if isinstance(key, int))
        return [found[key] for key in order], {key: one for key, one in found.items() if isinstance(key, str)}

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
        found = []
        each: list[Any] = described if isinstance(described, list) else [None]
        for one in each:
            right = isinstance(one, list) and len(one) == 5 and type(one[0]) in (int, str)
            right = right and one[1] in ("float", "int", "bool") and isinstance(one[2], list) and type(one[3]) is bool
            if not right or not all(type(n) is int and 0 < n < 2**40 for n in one[2]) or type(one[4]) is not int:
                raise EvclError("the form of its inputs cannot be read")
            found.append(Input(one[0], one[1], tuple(one[2]), one[3], one[4]))
        positions = sorted(one.key for one in found if isinstance(one.key, int))
        if not found or positions != list(range(len(positions))) or len({one.key for one in found}) != len(found):
            raise EvclError("the form of its inputs cannot be read")
        return cls(tuple(found))


def widened(x: Tensor, columns: int) -> Tensor:
    """x [..., columns] with zeros up to this many columns: steps of padding at the end of its sequences."""
    return x if x.shape[-1] >= columns else F.pad(x, (0, columns - x.shape[-1]))


def pack(
    inputs: Mapping[Key, object] | Sequence[object],
    form: Form | None = None,
    dtype: torch.dtype = torch.float32,
    masks: Sequence[str] = (),
    pads: Mapping[Key, int] | None = None,
) -> tuple[Tensor, Form]:
    """Pack inputs [N, ...] each, by name or by position, into one tensor [N, columns] of `dtype`; and their form.

    An input may be a list of sequences of different lengths, which are padded to the longest with the value in `pads`,
    or 0. If a form is given, the inputs must fit it; only the length of the sequences may differ. Masks that the form
    has, and without a form the first of `masks`, are made if they are missing and the form or the inputs need them.
    """
    named: dict[Key, object] = dict(inputs) if isinstance(inputs, Mapping) else dict(enumerate(inputs))
    pads = pads or {}
    if form is not None:
        pads = {one.key: one.pad for one in form.inputs}
        missing = [one.called for one in form.inputs if one.key not in named and one is not form.mask]
        more = [called(key) for key in named if key not in pads]
        if missing or more:
            wanted = ", ".join(one.called for one in form.inputs)
            lacks = "missing" if missing else "not among them"
            raise EvclError(f"the network was trained with {wanted}, but {(missing or more)[0]} is {lacks}")
    read = {key: _array(value, called(key), pads.get(key, 0)) for key, value in named.items()}
    lengths = next((found for _, found in read.values() if found is not None), None)
    arrays = {key: array for key, (array, _) in read.items()}
    if len({len(array) for array in arrays.values()}) > 1:
        sizes = ", ".join(f"{called(key)} has {len(array)}" for key, array in arrays.items())
        raise EvclError(f"all inputs must have the same number of examples, but {sizes}")
    if form is None:
        form = _form_of(arrays, dtype, pads, masks[0] if masks and lengths is not None else None)
    length = _length(form, arrays)
    made = form.mask
    if made is not None and made.key not in arrays:
        count = len(next(iter(arrays.values())))
        there = torch.full((count,), length) if lengths is None else lengths
        arrays[made.key] = torch.arange(length) < there.unsqueeze(1)
    return form.packed({one.key: _exact(arrays[one.key], one, dtype) for one in form.inputs}, dtype), form


def ragged(value: Any) -> bool:
    """Whether this is a list of sequences of different lengths."""
    if not isinstance(value, (list, tuple)) and getattr(getattr(value, "dtype", None), "kind", "") != "O":
        return False
    lengths = {len(one) if hasattr(one, "__len__") and getattr(one, "ndim", 1) != 0 else None for one in value}
    return len(lengths) > 1 and not any(isinstance(one, str) for one in value)


def _array(value: Any, called: str, pad: int) -> tuple[Tensor, Tensor | None]:
    """A tensor of any type; and, if it was a list of sequences of different lengths, these lengths."""
    if isinstance(value, Tensor):
        found = value.detach().cpu()
    elif ragged(value):
        pieces = [_array(one, called, pad)[0] if hasattr(one, "__len__") else None for one in value]
        if any(one is None or one.shape[1:] != pieces[0].shape[1:] for one in pieces):  # type: ignore[union-attr]
            raise EvclError(f"{called}: its examples have different shapes, in more than the length of a sequence")
        rows = [one for one in pieces if one is not None]
        kind = torch.int64 if all(not one.is_floating_point() for one in rows if len(one)) else torch.float64
        if all(one.dtype == torch.bool for one in rows if len(one)):
            kind = torch.bool
        padded = torch.nn.utils.rnn.pad_sequence([one.to(kind) for one in rows], True, pad)
        return padded, torch.tensor([len(one) for one in rows])
    else:
        array = numeric(value, called)
        if array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63:
            raise EvclError(f"{called} has the integer {int(array.max())}, which is too large")
        found = torch.from_numpy(array.astype(np.int64) if array.dtype.kind == "u" and array.itemsize > 1 else array)
    if found.is_complex():
        raise EvclError(f"{called} must be real numbers, not {found.dtype}")
    if found.dim() == 0 or found.numel() == 0:
        raise EvclError(f"{called} is empty or a single number: its shape is {tuple(found.shape)}, not [examples, ...]")
    return found, None


def _kind(array: Tensor) -> Kind:
    if array.dtype == torch.bool:
        return "bool"
    return "float" if array.is_floating_point() or array.dtype == torch.uint8 else "int"  # uint8: pixels


def _form_of(arrays: Mapping[Key, Tensor], dtype: torch.dtype, pads: Mapping[Key, int], mask: str | None) -> Form:
    """The form of inputs that are seen for the first time.

    The sequences are the integers and truth values [N, L, ...] that have the length L of the first of these, and
    floating-point numbers [N, L, F, ...] of the same length. Without integers, the first such input gives the length.
    """
    kinds = {key: _kind(array) for key, array in arrays.items()}
    tokens = [key for key, array in arrays.items() if kinds[key] != "float" and array.dim() > 1]
    deep = [key for key, array in arrays.items() if array.dim() > 2]
    first = tokens or deep
    length = arrays[first[0]].shape[1] if first else None
    named = {key for key in arrays if key in MASKS and arrays[key].dim() > 1}
    found = []
    for key, array in arrays.items():
        able = key in tokens or key in deep or key in named
        sequence = able and array.shape[1] == length
        shape = tuple(array.shape[2:] if sequence else array.shape[1:])
        pad = pads.get(key, 0) if sequence and kinds[key] == "int" else 0
        found.append(Input(key, kinds[key], shape, sequence, pad))
    if mask is not None and mask not in arrays and any(one.sequence for one in found):
        found.append(Input(mask, "int" if mask == MASKS[0] else "bool", (), True))
    return Form(tuple(found))


def _length(form: Form, arrays: Mapping[Key, Tensor]) -> int:
    """The length of the sequences in these arrays; raise if an array does not fit the form."""
    lengths: dict[str, int] = {}
    for one in form.inputs:
        if one.key not in arrays:
            continue
        shape = tuple(arrays[one.key].shape[1:])
        if one.sequence and shape[:1]:
            lengths[one.called] = shape[0]
            shape = shape[1:]
        elif one.sequence:
            shape = (-1,)
        if shape != one.shape:
            kind = "a step" if one.sequence else "an example"
            came = tuple(arrays[one.key].shape[1:])
            raise EvclError(f"{one.called}: {kind} had the shape {one.shape} at first, but now an example has {came}")
    if len(set(lengths.values())) > 1:
        both = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise EvclError(
            f"the sequences of an example have had one length in common so far, but {both}: pad them to one length, or "
            "give an input that is no sequence another shape from the start, such as [N, 1, width]"
        )
    return next(iter(lengths.values()), 0)


def _exact(array: Tensor, one: Input, dtype: torch.dtype) -> Tensor:
    """The values of one input; raise if they cannot be packed exactly in this dtype."""
    if one.kind == "float":
        found = array.to(dtype)
        if not bool(found.isfinite().all()):
            row = int((~found.isfinite()).reshape(len(found), -1).any(1).nonzero()[0])
            raise EvclError(f"{one.called} has NaN or infinity (first in example {row}): remove or replace them")
        return found
    if array.is_floating_point():
        if not bool((array == array.round()).all()):
            raise EvclError(
                f"{one.called} had only integers at first, but now has other numbers: pass floats from the start"
            )
        array = array.to(torch.int64)
    if one.kind == "bool" and not bool(((array == 0) | (array == 1)).all()):
        raise EvclError(f"{one.called} had only True and False at first, but now has other numbers")
    if one.kind == "int":
        array = array.to(torch.int64)
        most = int((array - one.pad).abs().max()) if array.numel() else 0
        if most > EXACT[dtype]:
            advice = (
                "make the learner with dtype=torch.float64" if most <= EXACT[torch.float64] else "number them from 0"
            )
            raise EvclError(
                f"{one.called} has integers up to {most:,}, but {str(dtype).removeprefix('torch.')} is exact only up "
                f"to {EXACT[dtype]:,}: {advice}"
            )
    return array
