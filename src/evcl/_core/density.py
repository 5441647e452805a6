"""What was learned from, as a few numbers: how far a row lies from it, and how much more doubtful it is.

Two things are kept of all rows together. One is a Gaussian over the inputs: their mean, the variance of each column,
and at most k directions that say how columns vary together. With k columns or fewer that is their whole covariance;
beyond, a sketch of it. The other is the mean doubt that the network had of its predictions. Both are averages over
rows, so that those of a further task are merged in, and the size stays the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from evcl._core.errors import EvclError

DIRECTIONS = 100  # at most
NUMBERS = 10_000  # that the directions may have, however small the network
CHUNK = 2**22  # numbers of a task that are looked at at once
SKETCHED = 1000  # rows of a task that a sketch's directions are taken from, about
SHRINK = 1 / 3  # rows without any correlation that are added for each column: few rows do not tell it
LEAST_SHRINK = 1e-3  # however many rows: the part of a column's variance that no other column explains
LEAST_DOUBT = 0.06  # a mean doubt below it counts as this: rows that were learned are doubted less than new ones
CONSTANT = 1e-7  # a column whose deviation is this part of its mean is constant


@dataclass(frozen=True)
class Density:
    """`about` is [2]: the number of rows, and their mean doubt; `rows.T @ rows` is the covariance, or nearly.

    All on the CPU. Rows here are directions, sorted by how much varies along them: none is an example.
    """

    about: Tensor  # float64, as are the next two
    mean: Tensor  # [columns]
    variance: Tensor  # [columns]
    rows: Tensor  # [k, columns], float32

    def merged(self, other: Density, most: int) -> Density:
        """Of both together: exact, but for directions that are left out where there are more than `most`."""
        n, m = float(self.about[0]), float(other.about[0])
        a, b = n / (n + m), m / (n + m)
        step = other.mean - self.mean
        variance = a * self.variance + b * other.variance + a * b * step**2
        parts = (math.sqrt(a) * self.rows.double(), math.sqrt(b) * other.rows.double(), math.sqrt(a * b) * step[None])
        about = torch.stack([self.about[0] + other.about[0], a * self.about[1] + b * other.about[1]])
        return Density(about, self.mean + b * step, variance, _directions(torch.cat(parts), variance.sqrt(), most))

    def unfamiliar(self, x: Tensor, doubt: Tensor) -> Tensor:
        """[N]: about 1 for a typical row of those learned, and larger the farther x [N, ...] is; at least 0.

        The root of the mean of two numbers that are about 1 over the rows learned: the squared distance from their
        mean, and the `doubt` [N] of the prediction, which is its entropy over its largest value. The inputs alone
        hardly know a new kind of image from those learned; the doubt alone is small of what lies far out.
        """
        step = max(1, CHUNK // len(self.mean))
        distance = torch.cat([self._distance(part) for part in x.flatten(1).split(step)])
        doubts = doubt.double() / float(self.about[1].clamp_min(LEAST_DOUBT))
        return ((distance + doubts) / 2).sqrt().clamp(max=torch.finfo(x.dtype).max).to(x.dtype)

    def _distance(self, x: Tensor) -> Tensor:
        """The larger of two: by the covariance, which sees what does not go together, and column by column, which sees
        all of them move together.
        """
        scale, spread, product, typical = (part.to(x.device) for part in self._inverse)
        z = (x.double() - self.mean.to(x.device)) / scale
        together = ((z**2 / spread).sum(1) - ((z @ product) ** 2).sum(1)) / typical
        return torch.maximum(together, (z**2).mean(1))

    @cached_property
    def _inverse(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The scale of each column, the inverse of the columns' correlation, as a diagonal less a product, and the
        squared distance that the rows learned have on average.

        A column that never varied has the middle one of the others' deviations for its scale.
        """
        std, least, columns = self.variance.sqrt(), CONSTANT * self.mean.abs(), len(self.mean)
        varies = std > least
        middle = float(std[varies].median()) if bool(varies.any()) else 1.0
        scale = torch.where(varies, std, least.clamp_min(middle))
        rows = torch.where(varies, self.rows.double() / scale, 0.0)
        added = SHRINK * columns
        t = max(added / (float(self.about[0]) + added), LEAST_SHRINK)
        spread = (1 - t) * (1 - (rows**2).sum(0)).clamp_min(0) + t  # what the directions do not explain
        rows = math.sqrt(1 - t) * rows
        inner = torch.eye(len(rows), dtype=rows.dtype) + (rows / spread) @ rows.T
        product = torch.linalg.solve_triangular(torch.linalg.cholesky(inner), rows / spread, upper=False).T
        trace = (1 / spread).sum() - (product**2).sum()
        typical = (columns - t * trace) / (1 - t) - (~varies).sum()
        return scale, spread, product, typical.clamp_min(1.0)

    def tensors(self) -> dict[str, Tensor]:
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @staticmethod
    def from_tensors(given: Mapping[str, Tensor]) -> Density:
        """What `tensors` gave; files come from anywhere, so whatever cannot be is an EvclError."""
        found = Density(**{one.name: given[one.name] for one in fields(Density)})
        columns = found.mean.shape
        shapes = found.about.shape == (2,) and len(columns) == 1 and columns[0] > 0 and found.variance.shape == columns
        kinds = all(t.dtype == torch.float64 for t in (found.about, found.mean, found.variance))
        if not shapes or not kinds or found.rows.dim() != 2 or found.rows.shape[1:] != columns:
            raise EvclError("its density is not of one shape")
        whole = found.rows.dtype == torch.float32 and all(bool(t.isfinite().all()) for t in found.tensors().values())
        if not whole or float(found.about[0]) < 1 or float(found.about[1]) < 0 or float(found.variance.min()) < 0:
            raise EvclError("its density should be finite, of at least one row")
        return found


def room(columns: int, weights: int) -> int:
    """The most directions there may be: no more numbers than the network has weights, or 10,000."""
    return max(1, min(columns, DIRECTIONS, max(NUMBERS, weights) // columns))


def density(x: Tensor, doubt: Tensor, most: int) -> Density:
    """Of the rows x [N, ...]; `doubt` is that of some of them. A sketch has its directions from some rows."""
    flat, found = x.detach().flatten(1), None
    mean_doubt = doubt.double().mean().cpu()
    whole = flat.shape[1] <= most
    for part in flat.split(max(1, CHUNK // flat.shape[1])):
        one = _of(part.double(), mean_doubt, most if whole else 0)
        found = one if found is None else found.merged(one, most if whole else 0)
    assert found is not None
    if whole:
        return found
    some = flat[:: math.ceil(len(flat) / SKETCHED)]
    centred = (some - found.mean.to(some)) / math.sqrt(len(some))
    return replace(found, rows=_directions(centred, found.variance.sqrt().to(some), most).cpu())


def _of(x: Tensor, doubt: Tensor, most: int) -> Density:
    mean = x.mean(0)
    centred = x - mean
    variance = centred.square().mean(0)
    rows = _directions(centred / math.sqrt(len(x)), variance.sqrt(), most)
    about = torch.stack([torch.tensor(float(len(x)), dtype=torch.float64), doubt])
    return Density(about, mean.cpu(), variance.cpu(), rows.cpu())


def _directions(rows: Tensor, std: Tensor, most: int) -> Tensor:
    """At most `most` rows whose scatter is that of these, or nearly: those along which scaled columns vary most."""
    if most == 0:
        return rows[:0].float()
    scale = torch.where(std > 0, std, 1.0)
    rows = rows / scale
    if most < rows.shape[1]:
        rows = rows.float()  # a sketch needs no more, and takes half the time
    if len(rows) > rows.shape[1]:
        values, vectors = torch.linalg.eigh(rows.T @ rows)
        found = vectors.T * values.clamp_min(0).sqrt()[:, None]
    else:
        found = torch.linalg.eigh(rows @ rows.T)[1].T @ rows
    kept: Tensor = found.flip(0)[:most] * scale
    return kept.float()
