"""The numbers of merged learners: the product of their posteriors, and the sums that they remember.

Sites started from one posterior q_0 and learned from different rows D_k, each q_k ~ q_0 p(D_k | w). With all rows,

    q ~ q_0 prod_k (q_k / q_0):    L = L_0 + sum_k (L_k - L_0),    L m = L_0 m_0 + sum_k (L_k m_k - L_0 m_0)

for Gaussians with precisions L_k (diagonal) and means m_k. What the sites share is divided out, so it counts once. For
a weight that q_0 does not have, such as that of a class which is new at a site, q_0 is the first prior. A precision
that fell below L_0 counts as L_0: rows add evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evcl._core.density import DIRECTIONS, Density, ranges
from evcl.methods.class_statistics import Statistics, square, triangle

MOST_COLUMNS = 1000  # with more, the density of all rows is that of the sites together, which count shared rows twice


@dataclass(frozen=True)
class Diagonal:
    """A Gaussian over some of the weights of the merged learner: `place` [P'] says which. All tensors are float64."""

    place: Tensor
    mean: Tensor
    precision: Tensor


def product(prior: Diagonal, sites: Sequence[Diagonal]) -> Diagonal:
    """The product above. `prior` has every weight, in order."""
    precision, moment = prior.precision.clone(), torch.zeros_like(prior.mean)
    for site in sites:
        first = prior.precision[site.place]
        own = torch.maximum(site.precision, first)
        precision.index_add_(0, site.place, own - first)
        moment.index_add_(0, site.place, own * (site.mean - prior.mean[site.place]))
    return Diagonal(prior.place, prior.mean + moment / precision, precision)


def summed(base: Tensor, sites: Sequence[Tensor], share: float = 1.0) -> Tensor:
    """What all rows add up to: the base's sum, and what each site added to it. A site has only this share of it."""
    return base + sum((site - share * base for site in sites), torch.zeros_like(base))


@dataclass(frozen=True)
class Counted:
    """Statistics of classes (see methods/class_statistics.py), with the position of each head's classes in the merged
    learner's heads.
    """

    statistics: Statistics
    heads: Mapping[int, tuple[int, Tensor]]  # head -> head of the merged learner, and the position of each class there


def statistics(base: Counted, sites: Sequence[Counted], sizes: Mapping[int, int]) -> Statistics:
    """The statistics of all rows, exactly: counts, sums and squares of features add up. `sizes` has the number of
    classes of each head.
    """
    width = square(base.statistics.common["scatter"][0]).shape[0]
    squares: list[Tensor] = []  # for each part, the sum of f f^T over its rows
    sums: list[dict[int, Tensor]] = []  # for each part and head, [C, 1 + D]: the number of rows and the sum of f
    for one in (base, *sites):
        whole = square(one.statistics.common["scatter"][0].double())
        own = {k: torch.zeros(size, 1 + width, dtype=torch.float64) for k, size in sizes.items()}
        for k, given in one.statistics.classes.items():
            count, mean = given[0, :, :1].double(), given[0, :, 1:].double()
            whole = whole + (count * mean).T @ mean
            into, place = one.heads[k]
            own[into].index_add_(0, place, torch.cat([count, count * mean], 1))
        squares.append(whole)
        sums.append(own)
    whole, classes = summed(squares[0], squares[1:]), {}
    for k in dict.fromkeys(one.heads[j][0] for one in (base, *sites) for j in one.statistics.classes):
        every = summed(sums[0][k], [some[k] for some in sums[1:]])
        count = every[:, :1].clamp_min(0)
        mean = torch.where(count > 0, every[:, 1:] / count.clamp_min(1e-12), 0.0)
        whole = whole - (count * mean).T @ mean
        classes[k] = torch.cat([count, mean], 1).to(base.statistics.common["scatter"]).unsqueeze(0)
    like = base.statistics.common
    common = {name: like[name] for name in ("centre", "scale")}
    for name in ("nll", "squares"):
        if name in like:
            common[name] = summed(like[name], [one.statistics.common[name] for one in sites])
    common["scatter"] = triangle(whole).to(like["scatter"]).unsqueeze(0)
    return Statistics(classes, common)


def density(base: Density, sites: Sequence[Density]) -> Density:
    """The density of all rows."""
    columns = len(base.mean)
    if columns > MOST_COLUMNS:
        found = sites[0]
        for one in sites[1:]:
            found = found.merged(one, max(len(each.rows) for each in sites))
        count = summed(base.about[0], [one.about[0] for one in sites])
        about = torch.stack([count, found.about[1]])
        return Density(about, found.mean, found.variance, found.rows, *ranges((base, *sites)))

    def total(of: Callable[[Density], Tensor]) -> Tensor:
        parts = [one.about[0] * of(one) for one in (base, *sites)]
        return summed(parts[0], parts[1:])

    count = total(lambda one: torch.ones_like(one.about[0]))
    mean = total(lambda one: one.mean) / count
    variance = (total(lambda one: one.variance + one.mean**2) / count - mean**2).clamp_min(0)
    rows = total(lambda one: one.rows.double().T @ one.rows.double() + torch.outer(one.mean, one.mean)) / count
    values, vectors = torch.linalg.eigh(rows - torch.outer(mean, mean))
    directions = (vectors.T * values.clamp_min(0).sqrt()[:, None]).flip(0)[: min(columns, DIRECTIONS)]
    doubt = (total(lambda one: one.about[1]) / count).clamp_min(0)
    return Density(torch.stack([count, doubt]), mean, variance, directions.float(), *ranges((base, *sites)))
