"""Targets y [N, D] that are values, one or several for each example: numbers, counts and yes-or-no labels."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl.targets.likelihood import Likelihood

LARGEST = 1e30  # of a target; its square must be finite in float64


class Values(Likelihood):
    """D values for each example: a head has D outputs.

    Attributes:
        wanted: what the targets must be, in words
    """

    wanted: ClassVar[str]

    def wrong(self, y: Tensor) -> Tensor:
        """[N, D]: which of these numbers cannot be targets."""
        return torch.zeros_like(y, dtype=torch.bool)

    def read(self, x: Tensor, y: Any, verb: str) -> Tensor:
        """[N, D] in float64; one target may also be [N]."""
        must = f"with likelihood={self.name!r}, targets must be {self.wanted}"
        try:
            array = np.asarray(y.detach().cpu() if isinstance(y, Tensor) else y)
        except ValueError as error:
            raise EvclError(f"targets must be an array: {error}") from None
        if array.dtype == object:
            try:
                array = array.astype(np.float64)
            except (TypeError, ValueError):
                raise EvclError(f"{must}, not text or objects") from None
        if array.dtype.kind not in "biuf":
            raise EvclError(f"{must}, not {array.dtype}")
        if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[1] == 0):
            raise EvclError(f"targets must have shape [examples] or [examples, targets], not {array.shape}")
        if len(array) != len(x):
            raise EvclError(f"there are {len(x)} inputs but {len(array)} targets")
        found = torch.from_numpy(array.astype(np.float64)).reshape(len(x), -1)
        bad = ~(found.abs() < LARGEST) | self.wrong(found)
        if bool(bad.any()):
            row = int(bad.any(1).nonzero()[0])
            value = float(found[row][bad[row]][0])
            raise EvclError(f"{must}, but row {row} has {value:g}")
        return found
