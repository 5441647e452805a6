"""What a user hands us, checked: inputs become a tensor, labels a list of classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from evcl.errors import EvclError

Label = int | str


def inputs(x: Any, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Inputs [N, ...] as a tensor of `dtype`; NaN, infinity, text and an empty array are refused."""
    if not isinstance(x, Tensor):
        array = np.asarray(x)
        if array.dtype.kind not in "biuf":
            raise EvclError(f"inputs must be numbers, not {array.dtype}: encode text and categories first")
        x = torch.from_numpy(np.ascontiguousarray(array))
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


def labels(y: Any, examples: int) -> list[Label]:
    """Labels as a list of integers or of strings, one an example."""
    array = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if array.ndim != 1:
        raise EvclError(f"labels must be [examples], one class each, not of shape {array.shape}")
    if len(array) != examples:
        raise EvclError(f"there are {examples} inputs but {len(array)} labels")
    if array.dtype.kind in "iub":
        return [int(v) for v in array.tolist()]
    values = array.tolist()
    if array.dtype.kind in "UO" and all(isinstance(v, str) for v in values):
        return [str(v) for v in values]
    if array.dtype.kind == "f":
        raise EvclError(
            f"labels are {array.dtype}, but classes are integers or strings: "
            "regression is not supported, and if these are classes use y.astype(int)"
        )
    raise EvclError(f"labels must be integers or strings, all of one kind, not {array.dtype}")
