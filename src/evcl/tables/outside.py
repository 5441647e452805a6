"""Numbers of a column that are far outside its others, as mistyped ones are. The rule is that of targets
(`evcl.targets.scale.far_outside`), but a column is read piece by piece, so its range is that of a sample.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from evcl.tables.source import Floats
from evcl.targets import scale

SAMPLE_NUMBERS = 4_096  # at most this many numbers of a column are kept
MOST_FAR = 50  # one number in this many may be far outside: more are no mistakes


class Ends(NamedTuple):
    """The range of a column's numbers, without one in a hundred at each end."""

    low: float
    high: float

    def far(self, numbers: Floats) -> Floats:
        """Which numbers are far outside."""
        far: Floats = scale.far_outside(torch.tensor(numbers), self._tensors()).numpy()
        return far

    def limited(self, numbers: Floats) -> Floats:
        """The numbers, with those far outside put on the end of the range."""
        limited: Floats = scale.limited(torch.tensor(numbers), self._tensors()).numpy()
        return limited

    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = torch.tensor(self, dtype=torch.float64)
        return low, high


class Sample:
    """Every k-th number of a column, with k as small as the memory for it allows."""

    def __init__(self) -> None:
        self._kept, self._every, self._seen = np.empty(0), 1, 0

    def see(self, numbers: Floats) -> None:
        self._kept = np.concatenate([self._kept, numbers[-self._seen % self._every :: self._every]])
        self._seen += len(numbers)
        while len(self._kept) > SAMPLE_NUMBERS:
            self._kept, self._every = self._kept[::2], 2 * self._every

    def outside(self, low: float, high: float) -> float:
        """The fraction of the numbers that are outside this range."""
        return float(((self._kept < low) | (self._kept > high)).mean()) if len(self._kept) else 0.0

    def ends(self) -> Ends | None:
        """None: there are too few numbers to tell."""
        if len(self._kept) < scale.MIN_RANGE_ROWS:
            return None
        low, high = scale.usual_range(torch.from_numpy(self._kept))
        return Ends(float(low), float(high))
