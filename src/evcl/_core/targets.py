"""Check targets that are not classes: numbers, counts and yes-or-no labels become a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from evcl._core.errors import EvclError

KINDS = {
    "gaussian": "numbers",
    "bernoulli": "0 or 1",
    "poisson": "whole numbers of at least 0",
}
LARGEST = 1e30  # of a target; its square must be finite in float64


def targets(y: Any, examples: int, likelihood: str) -> Tensor:
    """[N, D] in float64: D targets of each of the N examples; one target may also be [N]."""
    wanted = KINDS[likelihood]
    try:
        array = np.asarray(y.detach().cpu() if isinstance(y, Tensor) else y)
    except ValueError as error:
        raise EvclError(f"targets must be an array: {error}") from None
    if array.dtype == object:
        try:
            array = array.astype(np.float64)
        except (TypeError, ValueError):
            raise EvclError(f"with likelihood={likelihood!r}, targets must be {wanted}, not text or objects") from None
    if array.dtype.kind not in "biuf":
        raise EvclError(f"with likelihood={likelihood!r}, targets must be {wanted}, not {array.dtype}")
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[1] == 0):
        raise EvclError(f"targets must have shape [examples] or [examples, targets], not {array.shape}")
    if len(array) != examples:
        raise EvclError(f"there are {examples} inputs but {len(array)} targets")
    found = torch.from_numpy(array.astype(np.float64)).reshape(examples, -1)
    bad = ~(found.abs() < LARGEST)
    if likelihood == "bernoulli":
        bad |= (found != 0) & (found != 1)
    elif likelihood == "poisson":
        bad |= (found < 0) | (found != found.round())
    if bool(bad.any()):
        row = int(bad.any(1).nonzero()[0])
        value = float(found[row][bad[row]][0])
        raise EvclError(f"with likelihood={likelihood!r}, targets must be {wanted}, but row {row} has {value:g}")
    return found
