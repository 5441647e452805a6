"""`pack` puts the inputs of a network, which may be sequences, into one tensor: see evcl/_core/forms.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.forms import MASKS, Form, Input, Key, Kind, called
from evcl._core.inputs import numeric

EXACT = {torch.float32: 2**24, torch.float64: 2**53}  # the integers up to this size are exact


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
    lengths = next((n for _, n in read.values() if n is not None), None)
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
        data = value.detach().cpu()
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
        data = torch.from_numpy(array.astype(np.int64) if array.dtype.kind == "u" and array.itemsize > 1 else array)
    if data.is_complex():
        raise EvclError(f"{called} must be real numbers, not {data.dtype}")
    if data.dim() == 0 or data.numel() == 0:
        raise EvclError(f"{called} is empty or a single number: its shape is {tuple(data.shape)}, not [examples, ...]")
    return data, None


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
    inputs = []
    for key, array in arrays.items():
        able = key in tokens or key in deep or key in named
        sequence = able and array.shape[1] == length
        shape = tuple(array.shape[2:] if sequence else array.shape[1:])
        pad = pads.get(key, 0) if sequence and kinds[key] == "int" else 0
        inputs.append(Input(key, kinds[key], shape, sequence, pad))
    if mask is not None and mask not in arrays and any(one.sequence for one in inputs):
        inputs.append(Input(mask, "int" if mask == MASKS[0] else "bool", (), True))
    return Form(tuple(inputs))


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
        converted = array.to(dtype)
        if not bool(converted.isfinite().all()):
            row = int((~converted.isfinite()).reshape(len(converted), -1).any(1).nonzero()[0])
            raise EvclError(f"{one.called} has NaN or infinity (first in example {row}): remove or replace them")
        return converted
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
