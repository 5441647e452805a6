"""A small summary of the training inputs. It tells how unfamiliar a new row is.

The summary has three parts. One is a Gaussian over the inputs: their mean, the variance of each column, and at most k
directions that describe how the columns vary together. With k columns or fewer, the directions give the full
covariance; with more columns, a sketch of it. Another part is the mean doubt, which measures how uncertain the
network's predictions were. The third is the range of each column. Averages and ranges of more rows are known from those
of their parts, so another task's summary can be merged in without making it larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce

import torch
from torch import Tensor, nn

from evcl._core.devices import double, limited
from evcl._core.errors import EvclError

MAX_DIRECTIONS = 100  # maximum number of directions
MIN_DIRECTION_NUMBERS = 10_000  # directions may always hold this many numbers, even if the network has fewer weights
VALUES_AT_ONCE = 2**22  # input values processed at once
SKETCH_ROWS = 1000  # approximate number of rows of a task from which a sketch's directions are computed
PSEUDO_ROWS = 1 / 3  # uncorrelated pseudo-rows added per column, because few rows do not determine the correlation
LEAST_SHRINK = 1e-3  # minimum fraction of a column's variance that other columns do not explain, for any number of rows
# A network doubts the rows it was trained on less than new ones, all the more if they were few. So the mean doubt has a
# lower limit: LEAST_DOUBT, or FULLY_DOUBTED / n for n rows if that is smaller.
LEAST_DOUBT = 0.06
FULLY_DOUBTED = 60
MOST_COLUMNS = 1000  # with more, the summary of sites counts shared rows twice
CONSTANT_COLUMN_STD = 1e-7  # a column is constant if its standard deviation is at most this fraction of its mean


@dataclass(frozen=True)
class Density:
    """The summary. `about` [2] holds the number of training rows and their mean doubt.

    `rows` are not training rows but the directions, in descending order of variance: `rows.T @ rows` approximates the
    covariance of the columns. All tensors are on the CPU.
    """

    about: Tensor  # [2]; `about`, `mean` and `variance` are float64
    mean: Tensor  # [columns]
    variance: Tensor  # [columns]
    rows: Tensor  # [k, columns], float32
    low: Tensor  # [columns], float64: the smallest value of each column; -inf if a file does not have it
    high: Tensor  # [columns], float64: the largest value, or inf

    def merged(self, other: Density, most: int) -> Density:
        """Return the summary of both sets of rows. It is exact, except that only `most` directions are kept."""
        n, m = float(self.about[0]), float(other.about[0])
        a, b = n / (n + m), m / (n + m)
        step = other.mean - self.mean
        variance = a * self.variance + b * other.variance + a * b * step**2
        parts = (math.sqrt(a) * self.rows.double(), math.sqrt(b) * other.rows.double(), math.sqrt(a * b) * step[None])
        about = torch.stack([self.about[0] + other.about[0], a * self.about[1] + b * other.about[1]])
        rows = _directions(torch.cat(parts), variance.sqrt(), most)
        return Density(about, self.mean + b * step, variance, rows, *ranges((self, other)))

    def with_inputs(self, count: int) -> Density:
        """The summary with this many more columns, which were 0 in all rows so far."""
        more = self.mean.new_zeros(count)
        rows = torch.cat([self.rows, self.rows.new_zeros(len(self.rows), count)], 1)
        mean, variance, low, high = (torch.cat([t, more]) for t in (self.mean, self.variance, self.low, self.high))
        return Density(self.about, mean, variance, rows, low, high)

    def unfamiliar(self, x: Tensor, doubt: Tensor) -> Tensor:
        """[N], at least 0: 0.7 to 1 for a typical training row, and larger the farther x [N, ...] is from those rows.

        It is no distance alone: it is the root of the mean of two numbers, each at most about 1 on average over the
        training rows. One is the squared distance from their mean. The other is the `doubt` [N] of the prediction, its
        entropy divided by the largest possible entropy. The distance alone hardly tells a new kind of image from the
        training images; the doubt alone is small for rows that lie far out.
        """
        device = torch.device("cpu") if limited(x.device) else x.device  # one that has float64
        far = Unfamiliar(self).to(device)
        step = max(1, VALUES_AT_ONCE // len(self.mean))
        parts = zip(x.flatten(1).split(step), doubt.split(step), strict=True)
        return torch.cat([far(part.to(device), doubts.to(device)) for part, doubts in parts]).to(x.device)

    def within(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The rows x [N, ...], with each value outside the range of its column moved to the end of that range; and how
        far this moved each row, [N]: the root of the mean over columns of the squared distance, in units of a column's
        standard deviation. It is exactly 0 for every training row.
        """
        flat = x.flatten(1)
        low, high = (end.to(x.dtype).to(x.device) for end in (self.low, self.high))
        moved = torch.minimum(torch.maximum(flat, low), high)
        steps = double(flat - moved)
        return moved.reshape(x.shape), (steps / self.inverse[0].to(steps.device)).square().mean(1).sqrt()

    @cached_property
    def inverse(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The scale of each column, the inverse of the columns' correlation as a diagonal minus a product, and the mean
        squared distance of the training rows.

        A constant column is scaled by the median standard deviation of the others.
        """
        std, least, columns = self.variance.sqrt(), CONSTANT_COLUMN_STD * self.mean.abs(), len(self.mean)
        varies = std > least
        middle = float(std[varies].median()) if bool(varies.any()) else 1.0
        scale = torch.where(varies, std, least.clamp_min(middle))
        rows = torch.where(varies, self.rows.double() / scale, 0.0)
        added = PSEUDO_ROWS * columns
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
        """The inverse of `tensors`. Files are not trusted, so invalid values raise an EvclError."""
        end = torch.full_like(given["mean"], math.inf)
        given = {"low": -end, "high": end, **given}
        result = Density(**{one.name: given[one.name] for one in fields(Density)})
        shape = result.mean.shape
        shapes = result.about.shape == (2,) and len(shape) == 1 and shape[0] > 0 and result.variance.shape == shape
        kinds = all(t.dtype == torch.float64 for t in (result.about, result.mean, result.variance))
        if not shapes or not kinds or result.rows.dim() != 2 or result.rows.shape[1:] != shape:
            raise EvclError("the shapes or dtypes of its density tensors do not match")
        ends = result.low, result.high
        if any(t.shape != shape or t.dtype != torch.float64 for t in ends) or not bool((ends[0] <= ends[1]).all()):
            raise EvclError("the ranges of its density do not match its columns")
        averages = (result.about, result.mean, result.variance, result.rows)
        whole = result.rows.dtype == torch.float32 and all(bool(t.isfinite().all()) for t in averages)
        if not whole or float(result.about[0]) < 1 or float(result.about[1]) < 0 or float(result.variance.min()) < 0:
            raise EvclError("its density must be finite and describe at least one row")
        return result


class Unfamiliar(nn.Module):
    """`Density.unfamiliar` as a module: rows [N, columns] and their doubts [N] -> [N]."""

    mean: Tensor
    scale: Tensor
    spread: Tensor
    product: Tensor
    typical: Tensor

    def __init__(self, density: Density) -> None:
        super().__init__()
        names = ("scale", "spread", "product", "typical")
        for name, tensor in zip(("mean", *names), (density.mean, *density.inverse), strict=True):
            self.register_buffer(name, tensor)
        self.usual = max(float(density.about[1]), min(LEAST_DOUBT, FULLY_DOUBTED / float(density.about[0])))

    def forward(self, x: Tensor, doubt: Tensor) -> Tensor:
        """The distance is the larger of two. One uses the covariance and detects unusual combinations of columns; the
        other treats columns separately and detects a shift of all columns together.
        """
        z = (x.double() - self.mean) / self.scale
        together = ((z**2 / self.spread).sum(1) - ((z @ self.product) ** 2).sum(1)) / self.typical
        far = (torch.maximum(together, (z**2).mean(1)) + doubt.double() / self.usual) / 2
        return far.sqrt().clamp(max=torch.finfo(x.dtype).max).to(x.dtype)


def ranges(of: Sequence[Density]) -> tuple[Tensor, Tensor]:
    """[columns] each: the smallest and the largest value of each column in all of these."""
    return torch.stack([one.low for one in of]).amin(0), torch.stack([one.high for one in of]).amax(0)


def room(columns: int, weights: int) -> int:
    """The maximum number of directions. They may hold as many numbers as the network has weights, or 10,000 if more."""
    return max(1, min(columns, MAX_DIRECTIONS, max(MIN_DIRECTION_NUMBERS, weights) // columns))


def density(x: Tensor, doubt: Tensor, most: int) -> Density:
    """Summarise the rows x [N, ...]; `doubt` is that of some of them. A sketch's directions are those of a subset."""
    flat, mean_doubt = x.detach().flatten(1), double(doubt).mean().cpu()
    whole = flat.shape[1] <= most
    exact = most if whole else 0
    parts = (_of(double(part), mean_doubt, exact) for part in flat.split(max(1, VALUES_AT_ONCE // flat.shape[1])))
    summary = reduce(lambda all_, one: all_.merged(one, exact), parts)
    if whole:
        return summary
    subset = flat[:: math.ceil(len(flat) / SKETCH_ROWS)]
    subset = subset.cpu() if limited(subset.device) else subset
    centred = (subset - summary.mean.to(subset)) / math.sqrt(len(subset))
    return replace(summary, rows=_directions(centred, summary.variance.sqrt().to(subset), most).cpu())


def _of(x: Tensor, doubt: Tensor, most: int) -> Density:
    mean = x.mean(0)
    centred = x - mean
    variance = centred.square().mean(0)
    rows = _directions(centred / math.sqrt(len(x)), variance.sqrt(), most)
    about = torch.stack([torch.tensor(float(len(x)), dtype=torch.float64), doubt])
    ends = (x.amin(0).double().cpu(), x.amax(0).double().cpu())
    return Density(about, mean.cpu(), variance.cpu(), rows.cpu(), *ends)


def _directions(rows: Tensor, std: Tensor, most: int) -> Tensor:
    """At most `most` rows with about the same scatter: the directions along which the scaled columns vary most."""
    if most == 0:
        return rows[:0].float()
    scale = torch.where(std > 0, std, 1.0)
    rows = rows / scale
    if most < rows.shape[1]:
        rows = rows.float()  # precise enough for a sketch, in half the time
    if len(rows) > rows.shape[1]:
        values, vectors = torch.linalg.eigh(rows.T @ rows)
        directions = vectors.T * values.clamp_min(0).sqrt()[:, None]
    else:
        directions = torch.linalg.eigh(rows @ rows.T)[1].T @ rows
    largest: Tensor = directions.flip(0)[:most] * scale
    return largest.float()


def of_sites(base: Density, sites: Sequence[Density]) -> Density:
    """The summary of all rows, if each of the sites has learned on from the base: what they share counts once."""
    columns = len(base.mean)
    if columns > MOST_COLUMNS:
        most = max(len(each.rows) for each in sites)
        summary = reduce(lambda all_, one: all_.merged(one, most), sites)
        count = base.about[0] + sum(one.about[0] - base.about[0] for one in sites)
        low, high = ranges((base, *sites))
        return replace(summary, about=torch.stack([count, summary.about[1]]), low=low, high=high)

    def total(of: Callable[[Density], Tensor]) -> Tensor:
        first, *parts = (one.about[0] * of(one) for one in (base, *sites))
        return first + sum((one - first for one in parts), torch.zeros_like(first))

    count = total(lambda one: torch.ones_like(one.about[0]))
    mean = total(lambda one: one.mean) / count
    variance = (total(lambda one: one.variance + one.mean**2) / count - mean**2).clamp_min(0)
    rows = total(lambda one: one.rows.double().T @ one.rows.double() + torch.outer(one.mean, one.mean)) / count
    values, vectors = torch.linalg.eigh(rows - torch.outer(mean, mean))
    directions = (vectors.T * values.clamp_min(0).sqrt()[:, None]).flip(0)[: min(columns, MAX_DIRECTIONS)]
    doubt = (total(lambda one: one.about[1]) / count).clamp_min(0)
    return Density(torch.stack([count, doubt]), mean, variance, directions.float(), *ranges((base, *sites)))
