"""Check what a user passes in: inputs become a tensor, labels a list of classes, class weights a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evcl._core.errors import EvclError

Label = int | str  # and bool, which is an int
CHECKED_AT_ONCE = 2**22  # numbers that are checked at a time, so that a check needs no second copy of the inputs


def inputs(x: object, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Convert inputs [N, ...] to a tensor of `dtype`; refuse NaN, infinity, text and empty arrays."""
    if not isinstance(x, Tensor):
        x = torch.from_numpy(numeric(x, "inputs"))
    if x.is_complex():
        raise EvclError(f"inputs must be real numbers, not {x.dtype}")
    if x.dim() < 2:
        raise EvclError(f"inputs must have shape [examples, ...], not {tuple(x.shape)}; for one example pass x[None]")
    if x.numel() == 0:
        raise EvclError(f"the inputs are empty: shape {tuple(x.shape)}")
    tensor: Tensor = x.detach().to(device=device, dtype=dtype)
    if math.isfinite(tensor.sum()):  # then each is; a sum may also overflow
        return tensor
    rows = max(1, CHECKED_AT_ONCE * len(tensor) // tensor.numel())
    for start in range(0, len(tensor), rows):
        bad = ~tensor[start : start + rows].isfinite().flatten(1).all(1)
        if bool(bad.any()):
            row = start + int(bad.nonzero()[0])
            raise EvclError(f"the inputs contain NaN or infinity (first in example {row}): remove or replace them")
    return tensor


def numeric(x: object, called: str) -> np.ndarray:
    """Convert to an array that torch can share: numeric, in this machine's byte order, writable."""
    rows = x if isinstance(x, (list, tuple)) and any(isinstance(one, Tensor) for one in x) else None
    try:
        array = np.asarray(x) if rows is None else np.stack([np.asarray(one) for one in rows])
    except (ValueError, RuntimeError) as error:
        raise EvclError(f"{called} must be an array: {error}") from None
    if array.dtype == object and all(isinstance(v, (Real, np.bool_)) for v in array.flat):
        array = array.astype(np.float64)  # a frame with truth values beside numbers
    if array.dtype.kind not in "biuf":
        raise EvclError(f"{called} must be numbers, not {array.dtype}: encode text and categories first")
    kind = np.dtype(np.float64) if array.dtype.itemsize > 8 else array.dtype.newbyteorder("=")
    return np.require(array, kind, ["C", "W"])


def labels(y: Any, examples: int) -> list[Label]:
    """Convert labels to a list of integers, booleans or strings, one per example."""
    if isinstance(y, Tensor):
        y = y.detach().cpu().numpy()
    kinds = {type(v) for v in y} if isinstance(y, (list, tuple)) else set()
    if len(kinds) > 1 or str in kinds:  # numpy would convert them to one type, and cut zeros off the end of a text
        y = np.fromiter(y, dtype=object, count=len(y))
    try:
        array = np.asarray(y)
    except ValueError as error:
        raise EvclError(f"labels must be an array: {error}") from None
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise EvclError(f"labels must have shape [examples], one class per example, not {array.shape}")
    if len(array) != examples:
        raise EvclError(f"there are {examples} inputs but {len(array)} labels")
    if array.dtype.kind == "f":
        raise EvclError(
            f"labels are {array.dtype}, but classes are integers or strings: "
            "for numbers, make the learner with likelihood='gaussian'; if these are classes, use y.astype(int)"
        )
    values: list[Label] = array.tolist()
    if array.dtype.kind == "i":
        return values
    for kind in (str, bool, Integral):
        if all(isinstance(v, kind) for v in values):
            classes = [int(v) if kind is Integral else v for v in values]
            if kind is Integral and not all(-(2**63) <= int(v) < 2**63 for v in values):
                break
            return classes
    raise EvclError(f"labels must be 64-bit integers or strings, all of one type, not {array.dtype}")


def positions(y: Sequence[Label], classes: Sequence[Label], unknown: int | None = None) -> Tensor:
    """The index of each label in `classes`; `unknown` for a label that is not there, or an error if that is None."""
    place = {label: i for i, label in enumerate(classes)}
    try:
        return torch.tensor([place[label] if unknown is None else place.get(label, unknown) for label in y])
    except KeyError as error:
        raise EvclError(f"label {error} is not among the classes {list(classes)}") from None
