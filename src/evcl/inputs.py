"""What a user hands us, checked: inputs become a tensor, labels a list of classes."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evcl.errors import EvclError

Label = int | str  # and bool, which is an int


def inputs(x: Any, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Inputs [N, ...] as a tensor of `dtype`; NaN, infinity, text and an empty array are refused."""
    if not isinstance(x, Tensor):
        x = torch.from_numpy(_numbers(x))
    if x.is_complex():
        raise EvclError(f"inputs must be real numbers, not {x.dtype}")
    if x.dim() < 2:
        raise EvclError(f"inputs must be [examples, ...], not of shape {tuple(x.shape)}; one example is x[None]")
    if x.numel() == 0:
        raise EvclError(f"the inputs are empty: shape {tuple(x.shape)}")
    found: Tensor = x.detach().to(device=device, dtype=dtype)
    if not bool(found.isfinite().all()):
        row = int((~found.isfinite()).flatten(1).any(1).nonzero()[0])
        raise EvclError(f"the inputs hold NaN or infinity (first in example {row}): remove or replace them")
    return found


def _numbers(x: Any) -> np.ndarray:
    """An array that torch can share: of numbers, in this machine's byte order, writable."""
    try:
        array = np.asarray(x)
    except ValueError as error:
        raise EvclError(f"inputs must be an array: {error}") from None
    if array.dtype.kind not in "biuf":
        raise EvclError(f"inputs must be numbers, not {array.dtype}: encode text and categories first")
    kind = np.dtype(np.float64) if array.dtype.itemsize > 8 else array.dtype.newbyteorder("=")
    return np.require(array, kind, ["C", "W"])


def labels(y: Any, examples: int) -> list[Label]:
    """Labels as a list of integers, of booleans or of strings, one an example."""
    if isinstance(y, Tensor):
        y = y.detach().cpu().numpy()
    if isinstance(y, (list, tuple)) and len({type(v) for v in y}) > 1:  # numpy would make one kind of them
        y = np.fromiter(y, dtype=object, count=len(y))
    try:
        array = np.asarray(y)
    except ValueError as error:
        raise EvclError(f"labels must be an array: {error}") from None
    if array.ndim != 1:
        raise EvclError(f"labels must be [examples], one class each, not of shape {array.shape}")
    if len(array) != examples:
        raise EvclError(f"there are {examples} inputs but {len(array)} labels")
    if array.dtype.kind == "f":
        raise EvclError(
            f"labels are {array.dtype}, but classes are integers or strings: "
            "regression is not supported, and if these are classes use y.astype(int)"
        )
    values = array.tolist()
    for kind in (str, bool, Integral):
        if all(isinstance(v, kind) for v in values):
            found: list[Label] = [int(v) if kind is Integral else v for v in values]
            if kind is Integral and not all(-(2**63) <= int(v) < 2**63 for v in values):
                break
            return found
    raise EvclError(f"labels must be integers of 64 bits or strings, all of one kind, not {array.dtype}")


def positions(y: Sequence[Label], classes: Sequence[Label]) -> Tensor:
    """Where each label stands among the classes."""
    place = {label: i for i, label in enumerate(classes)}
    try:
        return torch.tensor([place[label] for label in y])
    except KeyError as error:
        raise EvclError(f"label {error} is not among the classes {list(classes)}") from None
