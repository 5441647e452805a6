"""The statistics of classes: the memory of a likelihood per class, the random features of its inputs, and the scores
of classes. The equations are in generative.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evcl._core.devices import double
from evcl._core.errors import EvclError
from evcl._core.randomness import Purpose, generator
from evcl.methods.memory import per_head, per_layer
from evcl.methods.merging import Moved, summed
from evcl.methods.method import Asked
from evcl.nn import BayesianNetwork, Gaussian, outputs
from evcl.nn.sizes import ON_GPU, PASS_NUMBERS
from evcl.posterior.classes import ClassMeans

FILTER_SIDE, POOL_SIDE = 7, 4  # of the convolutions: D / 16 filters of 7 x 7 pixels, averaged over 4 x 4 fields
MIN_IMAGE_SIDE = 2 * POOL_SIDE  # images with fewer pixels than this along a side are flattened: fields have 2 x 2
ROWS_AT_ONCE = 2048  # rows whose features are computed at a time
OUTPUTS_AT_ONCE = 500_000  # of the convolutions, computed at a time on a CPU: they stay in its cache
TEMPERATURES = tuple(2.0 ** (i / 4) for i in range(-4, 29))  # from 1/2 to 128


@dataclass(frozen=True)
class Statistics:
    """The memory: sums over all rows learned.

    `classes` maps heads to [R, C, 1 + D]: for each class, the number of rows and the mean of their features. `common`
    holds what the classes share: the upper triangle of the scatter within classes, the centre and scale of the inputs,
    the sum of squares of each input about the centre (files of earlier versions lack it), the NLL of held-out rows
    for each temperature and, if inputs were added, how many there were at first. Both are empty until the first
    task, or if a network takes tokens, whose numbers have no distances.
    """

    classes: dict[int, Tensor] = per_head()
    common: dict[str, Tensor] = per_layer()

    @cached_property
    def classifier(self) -> tuple[Tensor, Tensor]:
        """log p(f, c) / T up to a constant, as a linear function of the features: [R, D, C] and [R, C], over the
        classes of all heads. The offset is -inf for a class without rows.
        """
        return self.classifier_of(self.classes)

    def classifier_of(self, heads: Iterable[int]) -> tuple[Tensor, Tensor]:
        """`classifier`, over the classes of these heads."""
        every = self.joined(heads)
        count, mean = double(every[:, :, 0]), double(every[:, :, 1:])
        weights, offsets = [], []
        for r, (n, m, t) in enumerate(zip(count, mean, self.temperature, strict=True)):
            solved = torch.cholesky_solve(m.T, self.posterior(r).root[0])
            weights.append(solved / t)
            offsets.append((n.log() - n.sum().log() - 0.5 * (m.T * solved).sum(0)) / t)
        return torch.stack(weights).to(every), torch.stack(offsets).to(every)

    def posterior(self, r: int, classes: Tensor | None = None) -> ClassMeans:
        """The posterior of replica r over the classes of all heads, or over these [C, 1 + D], in float64."""
        every = torch.cat([one[r] for one in self.classes.values()]) if classes is None else classes
        scatter = square(double(self.common["scatter"][r])).unsqueeze(0)
        count, mean = double(every[None, :, 0]), double(every[None, :, 1:])
        return ClassMeans(count, mean, scatter, _pseudo_rows(scatter[0], float(count.sum())))

    def with_inputs(self, count: int) -> Statistics:
        """The same statistics, with this many more inputs, which were 0 in all rows so far."""
        if not self.classes:
            return self
        centre = self.common["centre"]
        wider = {name: F.pad(t, (0, count)) for name, t in self.common.items() if name in ("centre", "squares")}
        first = self.common.get("first", torch.full_like(centre[:, :1], centre.shape[1]))
        return Statistics(self.classes, {**self.common, **wider, "first": first})

    def merged(self, sites: Sequence[Statistics], moved: Sequence[Moved]) -> Statistics:
        """The statistics of all rows of sites that started from these, exactly: counts, sums and squares of features
        add up.
        """
        parts = (self, *sites)
        if not all(one.classes for one in parts):
            return Statistics()
        for one, to in zip(parts, moved, strict=True):
            one.joined(one.classes)  # raises if they do not fit each other
            if any(not torch.equal(one.common[name], self.common[name]) for name in ("centre", "scale")):
                raise EvclError(f"{to.name}: its inputs are scaled in another way than the base's")
        heads = dict.fromkeys(to.heads[j][0] for one, to in zip(parts, moved, strict=True) for j in one.classes)
        width, like = 1 + side_of(self.common["scatter"].shape[1]), self.common
        starts = dict(zip(heads, accumulate((moved[0].sizes[k] for k in heads), initial=0), strict=False))
        each = []  # the posterior of each part, over the classes of the merged model
        for one, to in zip(parts, moved, strict=True):
            rows = like["scatter"].new_zeros(sum(to.sizes[k] for k in heads), width)
            for j, given in one.classes.items():
                into, place = to.heads[j]
                rows[starts[into] + place] = given[0]
            each.append(one.posterior(0, rows))
        whole = each[0]
        for site in each[1:]:
            whole = whole.plus(site.minus(each[0]))
        every = torch.cat([whole.count[0].unsqueeze(1), whole.mean[0]], 1).to(like["scatter"]).unsqueeze(0)
        classes = dict(zip(heads, every.split([moved[0].sizes[k] for k in heads], 1), strict=True))
        common = {name: like[name] for name in ("centre", "scale")}
        for name in ("nll", "squares"):
            if name in like:
                common[name] = summed(like[name], [one.common[name] for one in sites])
        return Statistics(classes, {**common, "scatter": triangle(whole.scatter[0]).to(like["scatter"]).unsqueeze(0)})

    def joined(self, heads: Iterable[int]) -> Tensor:
        """[R, C, 1 + D]: the classes of these heads. Files are not trusted: tensors that do not belong together are
        refused.
        """
        classes = [self.classes[k] for k in heads]
        width = side_of(self.common["scatter"].shape[1]) if "scatter" in self.common else 0
        sizes = {"scatter": width * (width + 1) // 2, "scale": 1, "nll": len(TEMPERATURES)}
        right = self.common.keys() - {"squares", "first"} == {*sizes, "centre"} and all(
            t.dim() == 2 for t in self.common.values()
        )
        right = right and all(self.common[name].shape[1] == size for name, size in sizes.items())
        right = right and self.common.get("squares", self.common["centre"]).shape == self.common["centre"].shape
        if right and (first := self.common.get("first")) is not None:
            right = first.shape == self.common["scale"].shape and bool((first >= 1).all())
            right = right and bool((first <= self.common["centre"].shape[1]).all())
        shapes = {(one.dim(), one.shape[2:]) for one in classes}
        if right and shapes == {(3, torch.Size([1 + width]))}:
            joined = torch.cat(classes, 1)
            if float(joined[:, :, 0].min()) >= 0:
                return joined
        raise EvclError("the statistics of its classes do not fit each other")

    @property
    def temperature(self) -> Tensor:
        """[R]: the temperature of the smallest NLL, with log T normal around the middle of the grid before any row is
        held out: rows that are all predicted rightly would have T as small as can be.
        """
        nll = double(self.common["nll"])
        grid = nll.new_tensor(TEMPERATURES)
        return grid[(nll + (grid / grid[len(grid) // 2]).log().square()).argmin(1)]


def _pseudo_rows(scatter: Tensor, n: float) -> float:
    """k, for which S has the least expected error if features are Gaussian: the oracle approximating shrinkage (Chen et
    al., 2010), rho = k / (n + k) = (tr S^2 + tr^2 S) / ((n + 1) (tr S^2 - tr^2 S / D)), at most 1.
    """
    squares, trace = float(scatter.square().sum()), float(scatter.trace())
    above, below = squares + trace**2, (n + 1) * (squares - trace**2 / len(scatter))
    return max(1.0, n * above / max(below - above, 1e-6 * above, 1e-300))


def statistics_in(memory: object) -> Statistics | None:
    """The statistics of classes in a method's memory, which may be inside another method's memory; None: there are
    none.
    """
    if isinstance(memory, Statistics):
        return memory if memory.classes else None
    for one in fields(memory) if is_dataclass(memory) else ():
        if (inner := statistics_in(getattr(memory, one.name))) is not None:
            return inner
    return None


def side_of(numbers: int) -> int:
    return (math.isqrt(8 * numbers + 1) - 1) // 2


def square(flat: Tensor) -> Tensor:
    side = side_of(len(flat))
    i, j = torch.triu_indices(side, side, device=flat.device)
    matrix = flat.new_zeros(side, side)
    matrix[i, j] = flat
    matrix[j, i] = flat
    return matrix


def triangle(square: Tensor) -> Tensor:
    i, j = torch.triu_indices(len(square), len(square), device=square.device)
    return square[i, j]


# --- features ---------------------------------------------------------------------------------------------------------


def base(network: BayesianNetwork, weights: Tensor, x: Tensor) -> Tensor:
    """[U, N, ...] or [R, N, ...]: what the random units see: the inputs, or the features of a trunk that is fixed: that
    of a network without trained layers, or of one without its adapters.
    """
    if network.base_features:
        return outputs(network, network.without_adapters(weights), network.layout, x, [])
    if network.trunk_names:
        return x
    return outputs(network, weights[: len(x)], network.layout, x, [])  # the same for all replicas


def units(x: Tensor, common: dict[str, Tensor], r: int, seed: int) -> Tensor:
    """[N, D]: the random features of the rows x [N, ...] for replica r."""
    width = side_of(common["scatter"].shape[1])
    z = (x - common["centre"][r].view(x.shape[1:])).div_(common["scale"][r])
    drawn = drawn_weights(x, x.shape[1:], width, seed, first_inputs(common, r))
    if len(drawn) != 1:
        return features(z, drawn, width)
    most = ON_GPU[0] * PASS_NUMBERS if z.is_cuda else OUTPUTS_AT_ONCE
    size = max(1, most // (len(drawn[0]) * math.prod(z.shape[2:])))
    return torch.cat([features(some, drawn, width) for some in z.split(size)])


def features(z: Tensor, drawn: Sequence[Tensor], width: int) -> Tensor:
    """[N, D]: what units with these random weights make of scaled inputs z [N, ...]."""
    if len(drawn) == 0:
        z = z.flatten(1)
        return F.pad(z, (0, width - z.shape[1]))
    if len(drawn) == 1:
        return F.adaptive_avg_pool2d(F.conv2d(z, drawn[0], padding=FILTER_SIDE // 2).relu(), POOL_SIDE).flatten(1)
    return (z.flatten(1) @ drawn[0] + drawn[1]).relu()


def first_inputs(common: dict[str, Tensor], r: int) -> int | None:
    """The number of inputs before others were added; None: none were."""
    return int(common["first"][r]) if "first" in common else None


def drawn_weights(like: Tensor, shape: Sequence[int], width: int, seed: int, first: int | None = None) -> list[Tensor]:
    """The random weights for rows of this shape: the filters for images; or a matrix and biases; or none, if the
    features are those of a base model themselves. Inputs that were added after the `first` ones change nothing for rows
    in which they are 0.
    """
    source = generator(seed, Purpose.FEATURES)
    if width % POOL_SIDE**2:  # no number of random units
        return []
    if len(shape) == 3 and min(shape[1:]) >= MIN_IMAGE_SIDE:
        filters = torch.randn(width // POOL_SIDE**2, shape[0], FILTER_SIDE, FILTER_SIDE, generator=source).to(like)
        return [filters / filters.flatten(1).norm(dim=1).view(-1, 1, 1, 1)]
    inputs = math.prod(shape)
    at_first = inputs if first is None else first
    weight = (torch.randn(at_first, width, generator=source) / math.sqrt(at_first)).to(like)
    bias = torch.randn(width, generator=source).to(like)
    if inputs > at_first:
        more = [torch.randn(width, generator=generator(seed, Purpose.FEATURE, i)) for i in range(at_first, inputs)]
        weight = torch.cat([weight, (torch.stack(more) / math.sqrt(at_first)).to(like)])
    return [weight, bias]


def chunks(
    statistics: Statistics, x: Tensor, seeds: Sequence[int], size: int = ROWS_AT_ONCE
) -> Iterator[tuple[int, int, Tensor]]:
    """For each replica and each piece of x [U, N, ...]: the replica, the piece's first row, and its features [n, D]."""
    for r, seed in enumerate(seeds):
        for i, part in enumerate(x[r % len(x)].split(size)):
            yield r, i * size, units(part, statistics.common, r, seed)


# --- scores -----------------------------------------------------------------------------------------------------------


def scores(statistics: Statistics, seeds: Sequence[int], x: Tensor, heads: Sequence[int]) -> list[Tensor]:
    weight, offset = statistics.classifier
    per_head = [x.new_empty(len(seeds), x.shape[1], statistics.classes[k].shape[1]) for k in heads]
    sizes = [one.shape[1] for one in statistics.classes.values()]
    order = {k: i for i, k in enumerate(statistics.classes)}
    places = [order[k] for k in heads]
    for r, first, f in chunks(statistics, x, seeds):
        parts = torch.addmm(offset[r], f, weight[r]).split(sizes, 1)
        for into, place in zip(per_head, places, strict=True):
            into[r, first : first + len(f)] = parts[place]
    return per_head


def known_inputs(statistics: Statistics, q: Gaussian, asked: Asked) -> Tensor | None:
    """What the random units see of the inputs; None if the statistics of a head, or of such inputs, are unknown."""
    if not all(k in statistics.classes for k in asked.heads):
        return None
    x = base(asked.network, q.mean, asked.x)
    return x if math.prod(x.shape[2:]) == statistics.common["centre"].shape[1] else None


@torch.no_grad()
def log_joint(statistics: Statistics, q: Gaussian, asked: Asked) -> list[Tensor] | None:
    """[R, N, C] for each of the heads: log p(x, class) / T up to a constant; -inf for classes without rows. None if
    the statistics of one of the heads are unknown.
    """
    x = known_inputs(statistics, q, asked)
    return None if x is None else scores(statistics, asked.seeds, x, asked.heads)


class Likelihood(nn.Module):
    """`log_joint` of replica 0 for these heads as a module: what the random units see, [N, ...] -> [N, C], the heads
    side by side.
    """

    weight: Tensor
    offset: Tensor
    centre: Tensor
    scale: Tensor

    def __init__(self, statistics: Statistics, seed: int, shape: Sequence[int], heads: Sequence[int]) -> None:
        super().__init__()
        weight, offset = (t[0] for t in statistics.classifier)
        sizes, known = [one.shape[1] for one in statistics.classes.values()], list(statistics.classes)
        parts = [(weight.split(sizes, 1)[i], offset.split(sizes)[i]) for i in (known.index(k) for k in heads)]
        self.width = len(weight)
        least = torch.finfo(weight.dtype).min / 4  # instead of -inf, with which some runtimes do not compute
        self.register_buffer("weight", torch.cat([part for part, _ in parts], 1))
        self.register_buffer("offset", torch.cat([part for _, part in parts]).clamp_min(least))
        self.register_buffer("centre", statistics.common["centre"][0].view(*shape))
        self.register_buffer("scale", statistics.common["scale"][0])
        drawn = drawn_weights(weight, shape, self.width, seed, first_inputs(statistics.common, 0))
        self.drawn = nn.ParameterList(drawn).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        z = (x - self.centre) / self.scale
        return features(z, list(self.drawn), self.width) @ self.weight + self.offset
