"""The scale of numbers: what a head knows of its targets, beside its weights.

A network learns numbers as z = (y - m) / s, where m and s are the mean and the deviation of all targets that the head
has learned from.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

EARLIER_FACTOR = 2  # earlier errors count as at most this many times the last task's rows
FAR_RANGES, MIN_RANGE_ROWS = 10, 20  # a target is far outside if this many ranges away; fewer rows tell no range
TRAINING_NOISE_ROWS = 10  # the noise of training counts as this many rows beside those predicted before being learned


class Scale(NamedTuple):
    """What is known of the targets of a head; all tensors are [D] in float64."""

    rows: float
    mean: Tensor
    std: Tensor  # above 0
    errors: Tensor  # sum over rows of their squared errors before they were learned; earlier tasks count less
    tested: float  # the number of these rows
    tasks: int  # how many tasks were predicted before they were learned; 0: `errors` are of parts of the first task

    def noise(self, learned: Tensor) -> Tensor:
        """[N, D]: the variance of new rows around the prediction, `learned` [N, D] being that of rows learned from.

        If targets drift, the rows that come next lie farther away, as those of each task did before it was learned. And
        errors on new rows are larger than on rows that were learned from. So what counts is errors on new rows.
        """
        return (self.errors.to(learned.device) + TRAINING_NOISE_ROWS * learned) / (self.tested + TRAINING_NOISE_ROWS)

    def tested_on(self, errors: Tensor, first: bool) -> Scale:
        """After the rows of a task had these squared errors [n, D] before they were learned. `first`: they are of parts
        of the head's first task, which say nothing about drift, so those of the next task replace them.
        """
        n = len(errors)
        keep = min(1.0, EARLIER_FACTOR * n / max(self.tested, 1.0)) if self.tasks else 0.0
        total = keep * self.errors + errors.sum(0).clamp_min(0).cpu()
        return self._replace(errors=total, tested=keep * self.tested + n, tasks=self.tasks + (not first))

    def standardised(self, y: Tensor) -> Tensor:
        return (y - self.mean.to(y.device)) / self.std.to(y.device)

    def restored(self, z: Tensor) -> Tensor:
        return self.mean.to(z.device) + self.std.to(z.device) * z

    def merged(self, y: Tensor, w: Tensor) -> Scale:
        """With the mean and deviation of the earlier targets and of y [N, D], with the weights w [N, 1]."""
        n, m = self.rows, float(len(y))
        mean = (w * y).sum(0) / w.sum()
        variance = (w * (y - mean).square()).sum(0) / w.sum()
        a, b, step = n / (n + m), m / (n + m), mean - self.mean
        both = a * self.std.square() * (n > 0) + b * variance + a * b * step.square() * (n > 0)
        mean = self.mean + b * step if n else mean
        std = both.sqrt()
        least = 1e-9 * mean.abs()  # constant targets: what is left is rounding
        return self._replace(mean=mean, std=torch.where(std > least, std, self.std if n else torch.ones_like(std)))

    def described(self) -> dict[str, object]:
        """As JSON can hold it."""
        return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in self._asdict().items()}


def first_scale(outputs: int) -> Scale:
    """The scale of targets that are learned as they are."""
    none = torch.zeros(outputs, dtype=torch.float64)
    return Scale(0.0, none, torch.ones_like(none), none, 0.0, 0)


def far_outside(y: Tensor, ends: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """[N, D]: which targets y [N, D] are far outside the others, as mistyped ones are: more than 10 times the range of
    the rest away from it. The rest is all except one in a hundred at each end, and at least one. `ends`: its range, if
    that is known (see `usual_range`).
    """
    low, high = ends or usual_range(y)
    wide = FAR_RANGES * (high - low)
    return ((y < low - wide) | (y > high + wide)) & (wide > 0)


def limited(y: Tensor, ends: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The targets y [N, D], with those far outside put on the end of the range of the others. Otherwise a single one
    would decide the scale, the noise, and that all earlier rows were wrong.
    """
    ends = ends or usual_range(y)
    return torch.where(far_outside(y, ends), y.clamp(*ends), y)


def usual_range(y: Tensor) -> tuple[Tensor, Tensor]:
    """[D] each: the ends of the range of y [N, D] without one in a hundred at each end."""
    out = max(1, len(y) // 100) if len(y) >= MIN_RANGE_ROWS else 0
    ordered = y.sort(0).values
    return ordered[out], ordered[-1 - out]
