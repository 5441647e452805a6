"""A likelihood per class: a generative classifier on fixed random features (compare van de Ven, Li and Tolias, 2021).

    p(f(x) | c) = N(f(x); m_c, S),    p(c | x) = softmax_c [ (log n_c + log N(f(x); m_c, S)) / T ]

m_c is the mean of the features f of class c over n_c rows. All classes share S, the covariance within classes:

    S = (sum_c sum_{x in c} (f(x) - m_c)(f(x) - m_c)^T + k s^2 I) / (n + k),    s^2 its mean variance

Counts, means and the scatter are sums over rows. So tasks can come in any order, and give what all rows at once would
give: nothing is forgotten, and no row is kept. Softmax layers are different: their classes compete in training, so a
task without the old classes teaches them never to predict these.

The features are ReLU units with random weights, drawn from the seed. For images they are convolutions, averaged over a
grid of 4 x 4 fields. They are centred and scaled by the mean and the standard deviation of the first task's inputs. If
no layer of the trunk is trained, they are units on top of the trunk's features. If only adapters are trained (see
nn/lora.py), they are the features of the base model themselves, which has learned from far more data, plus a 0 if their
number is one that random units can have.

A Gaussian is too confident, so its log-likelihoods are divided by T. T minimises the NLL of rows that each task holds
out, predicted among all classes known by then; afterwards, these rows are added to the statistics as well.

This is the method `generative-classifier`, and the part of EVCL that tells apart classes, and domains of the same
classes, that were never learned together (see evcl.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evcl._core.errors import EvclError
from evcl._core.randomness import generator
from evcl._core.settings import TRAINING, Settings
from evcl._core.summaries import METHOD_SUMMARIES
from evcl.methods.data import TaskData
from evcl.methods.memory import per_layer, per_task
from evcl.methods.method import Asked, Learned, Learning, Method, Newcomer, Round
from evcl.nn import BayesianNetwork, Gaussian, outputs
from evcl.nn.sizes import ON_GPU, PASS_NUMBERS

LEAST, MOST, PER_ROW, PER_INPUT = 128, 1024, 2, 16  # D: 2 per row of the first task, 16 per input, within limits
PER_WEIGHT = 4  # beside a network, the matrix has at most this many numbers per weight: as many as EVCL itself keeps
FIELD, GRID = 7, 4  # of the convolutions: D / 16 filters of 7 x 7 pixels, averaged over 4 x 4 fields
SMALLEST = 8  # images with fewer pixels than this along a side are flattened
ADDED = 0.1  # k, the pseudo-rows that shrink S towards a multiple of the identity, per feature
CHUNK = 2048  # rows whose features are computed at a time
CACHED = 500_000  # on a CPU, this many outputs of the convolutions are computed at a time: they stay in its cache
BLOCK = 256  # columns of the scatter that are computed at a time
M = TypeVar("M")
Learn = Callable[[Any, Round, Settings], Learning]
# A task of fewer than MANY rows holds out all of them, one fold at a time; of more, one fold; of few, none
FOLDS, FEWEST, MANY = 5, 10, 1000
MOST_HELD = 1000  # rows
TEMPERATURES = tuple(2.0 ** (i / 4) for i in range(-4, 29))  # from 1/2 to 128
USUAL, DOUBT = 6.0, 5.0  # T before any row is held out, and how many rows that choice counts for
# A task of known classes is a new domain if this share of its rows is recognised as its own, and if the earlier domains
# know less than KNOWN of what its own rows tell about its labels, or less than NEARLY and have MISSED times their NLL
RECOGNISED, KNOWN, NEARLY, MISSED = 0.75, 0.5, 0.8, 5.0
# but not if more than NEW of the variance of its inputs is in inputs that varied less than a tenth as much before
NEW, TENTH = 0.5, 0.1
FAMILIAR, STRANGE = 5.0, 10.0  # d at which old outputs are trusted fully, and not at all: see `familiarity`
MOST_ASKED = 500  # rows for which d is computed
OWN = -1  # the head under which a task of an unknown domain is counted while it is judged


@dataclass(frozen=True)
class Statistics:
    """The memory: sums over all rows learned.

    `classes` maps heads to [R, C, 1 + D]: for each class, the number of rows and the mean of their features. `common`
    holds what the classes share: the upper triangle of the scatter within classes, the centre and scale of the inputs,
    the sum of squares of each input about the centre (files of earlier versions lack it), and the NLL of held-out rows
    for each temperature. Both are empty until the first task, or if a network takes tokens, whose numbers have no
    distances.
    """

    classes: dict[int, Tensor] = per_task()
    common: dict[str, Tensor] = per_layer()

    @cached_property
    def classifier(self) -> tuple[Tensor, Tensor]:
        """log p(f, c) / T up to a constant, as a linear function of the features: [R, D, C] and [R, C], over the
        classes of all heads. The offset is -inf for a class without rows.
        """
        self._check()
        every = torch.cat(list(self.classes.values()), 1)
        count, mean = every[:, :, 0].double(), every[:, :, 1:].double()
        weights, offsets = [], []
        for r, (n, m, t) in enumerate(zip(count, mean, self.temperature, strict=True)):
            solved = torch.cholesky_solve(m.T, self.root(r))
            weights.append(solved / t)
            offsets.append((n.log() - n.sum().log() - 0.5 * (m.T * solved).sum(0)) / t)
        return torch.stack(weights).to(every.dtype), torch.stack(offsets).to(every.dtype)

    def root(self, r: int) -> Tensor:
        """[D, D]: the Cholesky factor of S, for replica r."""
        scatter = _square(self.common["scatter"][r].double())
        rows, k = sum(one[r, :, 0].double().sum() for one in self.classes.values()), ADDED * len(scatter)
        spread = (scatter.diagonal().mean() / rows).clamp_min(1e-12)
        scatter.diagonal().add_(k * spread)
        found: Tensor = torch.linalg.cholesky(scatter / (rows + k))
        return found

    def _check(self) -> None:
        """Files are not trusted: refuse tensors that do not belong together."""
        width = _side(self.common["scatter"].shape[1]) if "scatter" in self.common else 0
        sizes = {"scatter": width * (width + 1) // 2, "scale": 1, "nll": len(TEMPERATURES)}
        right = self.common.keys() - {"squares"} == {*sizes, "centre"} and all(
            t.dim() == 2 for t in self.common.values()
        )
        right = right and all(self.common[name].shape[1] == size for name, size in sizes.items())
        right = right and self.common.get("squares", self.common["centre"]).shape == self.common["centre"].shape
        shapes = {(one.dim(), one.shape[2:]) for one in self.classes.values()}
        if (
            not right
            or shapes != {(3, torch.Size([1 + width]))}
            or any(float(t[:, :, 0].min()) < 0 for t in self.classes.values())
        ):
            raise EvclError("the statistics of its classes do not fit each other")

    @property
    def temperature(self) -> Tensor:
        """[R]: the temperature with the smallest NLL."""
        grid = torch.tensor(TEMPERATURES, dtype=torch.float64, device=self.common["nll"].device)
        total = self.common["nll"].double() + DOUBT * (grid / USUAL).log().square()
        return grid[total.argmin(1)]


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
    width = _side(common["scatter"].shape[1])
    z = (x - common["centre"][r].view(x.shape[1:])).div_(common["scale"][r])
    drawn = _drawn(x, x.shape[1:], width, seed)
    if not drawn:
        return F.pad(z.flatten(1), (0, width - z[0].numel()))
    if len(drawn) == 1:
        (filters,) = drawn
        most = ON_GPU[0] * PASS_NUMBERS if z.is_cuda else CACHED
        size = max(1, most // (len(filters) * math.prod(z.shape[2:])))
        found = z.new_empty(len(z), len(filters), GRID, GRID)
        for into, some in zip(found.split(size), z.split(size), strict=True):
            into.copy_(F.adaptive_avg_pool2d(F.conv2d(some, filters, padding=FIELD // 2).relu_(), GRID))
        return found.flatten(1)
    weight, bias = drawn
    return (z.flatten(1) @ weight).add_(bias).relu_()


def _drawn(like: Tensor, shape: Sequence[int], width: int, seed: int) -> list[Tensor]:
    """The random weights for rows of this shape: the filters for images; or a matrix and biases; or none, if the
    features are those of a base model themselves.
    """
    source = generator(seed, "features")
    if width % GRID**2:  # no number of random units
        return []
    if image(shape):
        filters = torch.randn(width // GRID**2, shape[0], FIELD, FIELD, generator=source).to(like)
        return [filters / filters.flatten(1).norm(dim=1).view(-1, 1, 1, 1)]
    inputs = math.prod(shape)
    weight = (torch.randn(inputs, width, generator=source) / math.sqrt(inputs)).to(like)
    return [weight, torch.randn(width, generator=source).to(like)]


def image(shape: Sequence[int]) -> bool:
    return len(shape) == 3 and min(shape[1:]) >= SMALLEST


def _chunks(
    statistics: Statistics, x: Tensor, seeds: Sequence[int], size: int = CHUNK
) -> Iterator[tuple[int, int, Tensor]]:
    """For each replica and each piece of x [U, N, ...]: the replica, the piece's first row, and its features [n, D]."""
    for r, seed in enumerate(seeds):
        for i, part in enumerate(x[r % len(x)].split(size)):
            yield r, i * size, units(part, statistics.common, r, seed)


# --- learning ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def counted(statistics: Statistics, round_: Round, most: float = math.inf) -> Statistics:
    """The statistics after this round. Their matrix has at most `most` numbers, or that of the fewest features."""
    network, mean = round_.network, round_.posterior.mean
    if network.takes_tokens:
        return statistics
    tasks = []
    for task in round_.tasks:
        known = task.head in statistics.classes or task.head not in round_.seen
        if known:  # otherwise earlier rows of the head are missing: it was saved by an earlier version
            x = base(network, mean, task.x)  # has one part per replica where the trunk's weights are used
            tasks.append(replace(task, x=x, y=task.y.expand(len(x), -1)))
    for task in tasks:
        if not statistics.common:
            statistics = replace(statistics, common=_first(task.x, round_, most))
    tasks = [task for task in tasks if statistics.common["centre"].shape[1] == math.prod(task.x.shape[2:])]
    if not tasks:  # inputs of another shape have other features, and no statistics
        return statistics
    orders = [_shuffled(task, i, round_) for i, task in enumerate(tasks)]
    n = sum(order.shape[1] for order in orders)
    nll = statistics.common["nll"].clone()
    for fold in range(0 if n < FEWEST else FOLDS if n < MANY else 1):
        rest, held = statistics, []
        for task, order in zip(tasks, orders, strict=True):
            own = torch.arange(order.shape[1], device=order.device) % FOLDS == fold
            rest = _added(rest, task, order[:, ~own], network.classes(task.head), round_.seeds)
            held.append((task, order[:, own]))
        rest = replace(rest, common={**rest.common, "nll": _certain(nll)})  # its T is 1
        for task, rows in held:
            nll += _nll(rest, task, rows[:, :MOST_HELD], round_)
        if n >= MANY:  # the rest is already counted
            statistics, orders = rest, [rows for _, rows in held]
    statistics = replace(statistics, common={**statistics.common, "nll": nll})
    for task, order in zip(tasks, orders, strict=True):
        statistics = _added(statistics, task, order, network.classes(task.head), round_.seeds)
    return Statistics(
        {k: round_.same(one) for k, one in statistics.classes.items()},
        {name: round_.same(one) for name, one in statistics.common.items()},
    )


def _first(x: Tensor, round_: Round, most: float) -> dict[str, Tensor]:
    """The centre and scale of the first task's inputs x [U, N, ...], and sums of no rows."""
    own = torch.arange(len(round_.seeds)) % len(x)
    flat = x.flatten(2)
    centre = flat.mean(1)
    scale = (flat - centre.unsqueeze(1)).square_().mean((1, 2)).sqrt().clamp_min(1e-12)
    common = {"centre": centre[own], "scale": scale[own].unsqueeze(1)}
    room = MOST if most >= MOST * (MOST + 1) / 2 else _side(int(most))
    width = max(LEAST, min(PER_ROW * flat.shape[1], PER_INPUT * flat.shape[2], MOST, room))
    width -= width % GRID**2
    own_width = flat.shape[2] + (flat.shape[2] % GRID**2 == 0)
    if round_.network.base_features and own_width <= MOST:  # the matrix is small beside the base model
        width = own_width
    common["scatter"] = flat.new_zeros(len(own), width * (width + 1) // 2)
    common["nll"] = flat.new_zeros(len(own), len(TEMPERATURES))
    common["squares"] = flat.new_zeros(len(own), flat.shape[2])
    return common


def _shuffled(task: TaskData, i: int, round_: Round) -> Tensor:
    """[R, n]: the rows of task i in random order."""
    sources = round_.generators("folds", i)
    return torch.stack([torch.randperm(task.y.shape[1], generator=g) for g in sources]).to(task.y.device)


def _added(statistics: Statistics, task: TaskData, rows: Tensor, classes: int, seeds: Sequence[int]) -> Statistics:
    """Add the rows [R, n] of a task to its head, which has this many classes, piece by piece: sums of squares are about
    the mean, and merged exactly.
    """
    dtype = torch.float64 if task.x.is_cuda else task.x.dtype
    changed = {name: one.clone() for name, one in statistics.common.items() if name in ("scatter", "squares")}
    scatter = changed["scatter"]
    before = statistics.classes.get(task.head)
    width = _side(scatter.shape[1])
    after = scatter.new_zeros(len(scatter), classes, 1 + width)
    if before is not None:
        after[:, : before.shape[1]] = before
    for r, seed in enumerate(seeds):
        own, total = r % len(task.x), _square(scatter[r].to(dtype))
        for some in rows[r].split(CHUNK):
            x = task.x[own].index_select(0, some)
            f = units(x, statistics.common, r, seed).to(dtype)
            weights = f.new_ones(len(f)) if task.weights is None else task.weights[r % len(task.weights), some].to(f)
            among = F.one_hot(task.y[own, some], classes).to(f) * weights.unsqueeze(1)  # [n, C]
            if "squares" in changed:
                changed["squares"][r] += weights.to(x) @ (x.flatten(1) - statistics.common["centre"][r]).square_()
            count, old = among.sum(0), after[r].to(dtype)
            mean = among.T @ f / count.clamp_min(1e-12).unsqueeze(1)
            centred = f.sub_(mean[task.y[own, some]]).mul_(weights.sqrt().unsqueeze(1))
            step = torch.where(count.unsqueeze(1) > 0, mean - old[:, 1:], 0.0)
            whole = (old[:, 0] + count).clamp_min(1e-12)
            apart = step * (old[:, 0] * count / whole).sqrt().unsqueeze(1)
            _add_squares(total, centred)
            _add_squares(total, apart)
            after[r, :, 1:] = old[:, 1:] + step * (count / whole).unsqueeze(1)
            after[r, :, 0] = old[:, 0] + count
        scatter[r] = _triangle(total)
    return Statistics({**statistics.classes, task.head: after}, {**statistics.common, **changed})


def _add_squares(total: Tensor, rows: Tensor) -> None:
    """Add rows^T rows to the upper triangle of a matrix, in place. The lower one is not used, and has other values."""
    for i in range(0, len(total), BLOCK):
        total[i : i + BLOCK, i:].addmm_(rows[:, i : i + BLOCK].T, rows[:, i:])


def _certain(nll: Tensor) -> Tensor:
    """NLLs for which the temperature is 1."""
    found = torch.full_like(nll, 1e9)
    found[:, TEMPERATURES.index(1.0)] = -1e9
    return found


def _nll(statistics: Statistics, task: TaskData, rows: Tensor, round_: Round) -> Tensor:
    """[R, temperatures]: the total NLL of these rows among all known classes. The statistics' own T must be 1."""
    heads = list(statistics.classes)
    start = sum(statistics.classes[k].shape[1] for k in heads[: heads.index(task.head)])
    own = torch.arange(len(rows), device=rows.device).unsqueeze(1) % len(task.x)
    scores = torch.cat(_scores(statistics, round_.seeds, task.x[own, rows], heads), 2)
    y = start + task.y[own, rows]
    found = [
        F.cross_entropy((scores / t).flatten(0, 1), y.flatten(), reduction="none").view(y.shape) for t in TEMPERATURES
    ]
    return torch.stack(found, 2).nan_to_num(0.0, 0.0).sum(1)  # a row whose class has no other rows says nothing


@torch.no_grad()
def familiarity(statistics: Statistics, round_: Round) -> dict[int, Tensor]:
    """[R, 1] for each head whose statistics are known: how far its outputs on the inputs of this round can be trusted.

        1 for d up to 5, 0 from d = 10 on, and a straight line between;
        d = median over rows of min_c (f(x) - m_c)^T S^-1 (f(x) - m_c) / D,    c a class of the head

    d is about 1 for inputs of the same kind, and 1 to 4 for other classes of the same images. It is large if inputs
    vary in directions in which those of earlier tasks did not. If most of their variance is in inputs that hardly
    varied before, the familiarity is 0 as well.
    """
    if not statistics.classes:
        return {}
    network, mean, replicas = round_.network, round_.posterior.mean, range(len(round_.seeds))
    every = []
    for i, task in enumerate(round_.tasks):
        rows = _shuffled(task, i, round_)[:, :MOST_ASKED]
        x = base(network, mean, task.take(rows)[0])
        if math.prod(x.shape[2:]) == statistics.common["centre"].shape[1]:
            every.append(x)
    if not every:
        return {}
    x = torch.cat(every, 1)
    found = torch.stack([_trust(statistics, x[r], round_.n, r, round_.seeds[r]) for r in replicas])
    found = round_.same(found.to(mean))
    return {k: found[:, i : i + 1] for i, k in enumerate(statistics.classes)}


def _trust(statistics: Statistics, x: Tensor, n: int, r: int, seed: int) -> Tensor:
    """[heads]: the familiarity of n rows, of which x [N, ...] are some, for replica r."""
    root = statistics.root(r)

    def whitened(f: Tensor) -> Tensor:
        found: Tensor = torch.linalg.solve_triangular(root, f.double().T, upper=False).T
        return found

    z, found = whitened(units(x, statistics.common, r, seed)), []
    for one in statistics.classes.values():
        apart = torch.cdist(z, whitened(one[r, :, 1:])).square().masked_fill(one[r, :, 0] == 0, math.inf)
        found.append(apart.amin(1).median() / z.shape[1])
    trust = ((STRANGE - torch.stack(found)) / (STRANGE - FAMILIAR)).clamp(0, 1)
    return trust * ~_uses_other_inputs(statistics, x, n, r)


# --- predictions ------------------------------------------------------------------------------------------------------


def _scores(statistics: Statistics, seeds: Sequence[int], x: Tensor, heads: Sequence[int]) -> list[Tensor]:
    weight, offset = statistics.classifier
    found = [x.new_empty(len(seeds), x.shape[1], statistics.classes[k].shape[1]) for k in heads]
    sizes = [one.shape[1] for one in statistics.classes.values()]
    places = [list(statistics.classes).index(k) for k in heads]
    for r, first, f in _chunks(statistics, x, seeds):
        parts = torch.addmm(offset[r], f, weight[r]).split(sizes, 1)
        for into, place in zip(found, places, strict=True):
            into[r, first : first + len(f)] = parts[place]
    return found


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
        self.drawn = nn.ParameterList(_drawn(weight, shape, self.width, seed)).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        z = (x - self.centre) / self.scale
        if len(self.drawn) == 0:
            z = z.flatten(1)
            features = F.pad(z, (0, self.width - z.shape[1]))
        elif len(self.drawn) == 1:
            features = F.adaptive_avg_pool2d(F.conv2d(z, self.drawn[0], padding=FIELD // 2).relu(), GRID).flatten(1)
        else:
            features = (z.flatten(1) @ self.drawn[0] + self.drawn[1]).relu()
        return features @ self.weight + self.offset


def statistics_in(memory: Any) -> Statistics | None:
    """The statistics of classes in a method's memory, which may be inside another method's memory; None: there are
    none.
    """
    if isinstance(memory, Statistics):
        return memory if memory.classes else None
    for one in fields(memory) if is_dataclass(memory) else ():
        if (found := statistics_in(getattr(memory, one.name))) is not None:
            return found
    return None


def _known(statistics: Statistics, q: Gaussian, asked: Asked) -> Tensor | None:
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
    x = _known(statistics, q, asked)
    return None if x is None else _scores(statistics, asked.seeds, x, asked.heads)


@torch.no_grad()
def domains(statistics: Statistics, q: Gaussian, asked: Asked, task: Newcomer) -> tuple[Tensor, Tensor] | None:
    """Whether a task of known classes is a new domain [R], and the share of its rows that belong to each of the known
    ones [R, domains]. None if the statistics of one of the heads are unknown.

    Half of its rows, at most 1,000, are counted as classes of their own; the other half is judged. The task is a new
    domain if all are true:

        recognised:  p(own | x) > p(d | x) for each known domain d, for three rows in four
        unknown:     I(known) < 1/2 I(own), or I(known) < 4/5 I(own) and NLL(known) > 5 NLL(own), where
                     NLL(d) = -log p(y | x, d) on average, and I(d) = H(y) - NLL(d)
        crowded:     half of the variance of its inputs, or more, is in inputs that varied before

    So a prediction can tell which domain an input is from, and the task's labels follow a rule that the known domains
    hardly know. Files of one distribution are not recognised: their rows are as likely under the earlier files. If a
    task uses other inputs, such as the columns of another product, no weight of these inputs has learned anything yet.
    So one softmax learns it without forgetting, and an input can not be taken for one of another domain.
    """
    x = _known(statistics, q, asked)
    if x is None:
        return None
    found = [_judged(statistics, x[r % len(x)], asked, task, r) for r in range(len(asked.seeds))]
    new, shares = zip(*found, strict=True)
    return torch.stack(new), torch.stack(shares)


def _judged(statistics: Statistics, x: Tensor, asked: Asked, task: Newcomer, r: int) -> tuple[Tensor, Tensor]:
    seed, y = asked.seeds[r], task.y[r % len(task.y)]
    rows = (y >= 0).nonzero().flatten().cpu()
    rows = rows[torch.randperm(len(rows), generator=generator(seed, "domain", len(rows)))][: 2 * MOST_HELD].to(x.device)
    counted, judged = rows[::2], rows[1::2]
    alone = Statistics(
        {k: one[r : r + 1] for k, one in statistics.classes.items()},
        {name: one[r : r + 1] for name, one in statistics.common.items()},
    )
    size = 1 + max(max(some) for some in task.classes)
    own = TaskData(x.unsqueeze(0), y.unsqueeze(0), OWN)
    alone = _added(alone, own, counted.unsqueeze(0), size, [seed])
    *known, own_scores = (one[0] for one in _scores(alone, [seed], x[judged].unsqueeze(0), [*asked.heads, OWN]))
    count, y = 1 + max(task.domains), y[judged]
    of_domain = torch.stack([_total(known, [d == k for d in task.domains]) for k in range(count)], 1)
    label = torch.tensor([c for one, some in zip(known, task.classes, strict=True) for c in some[: one.shape[1]]])
    right = torch.cat(known, 1).masked_fill(label.to(y.device) != y.unsqueeze(1), -math.inf).logsumexp(1)
    by_known = right - of_domain.logsumexp(1)
    by_own = own_scores.log_softmax(1).gather(1, y.unsqueeze(1)).squeeze(1)
    frequency = torch.bincount(y, minlength=size).to(x) / max(1, len(y))
    nll = -torch.stack([by_known, by_own])
    nll = nll[:, nll.isfinite().all(0)].mean(1)  # a row whose class has no other rows says nothing
    told = torch.special.entr(frequency).sum() - nll
    unknown = (told[0] < KNOWN * told[1]) | ((told[0] < NEARLY * told[1]) & (nll[0] > MISSED * nll[1]))
    mine = (own_scores.logsumexp(1) > of_domain.amax(1)).sum()
    recognised = (mine + 1) / (len(judged) + 2) >= RECOGNISED
    crowded = ~_uses_other_inputs(statistics, x[rows], task.y.shape[1], r)
    return recognised & unknown & crowded, of_domain.softmax(1).sum(0)


def _uses_other_inputs(statistics: Statistics, x: Tensor, n: int, r: int) -> Tensor:
    """Whether most of the variance of a task with n rows, of which x are some, is in inputs that varied less than a
    tenth as much before, in all earlier rows together. False if the variances of earlier rows are unknown.
    """
    if "squares" not in statistics.common:
        return torch.tensor(False, device=x.device)
    variance = x.flatten(1).var(0, correction=0)
    new = statistics.common["squares"][r] < TENTH * n * variance
    return (variance * new).sum() > NEW * variance.sum()


def _total(scores: Sequence[Tensor], wanted: Sequence[bool]) -> Tensor:
    """[N]: log p(x) up to a constant, over the classes of the heads that are wanted."""
    return torch.cat([one for one, use in zip(scores, wanted, strict=True) if use], 1).logsumexp(1)


# --- methods ----------------------------------------------------------------------------------------------------------


def with_classes(learn: Learn) -> Learn:
    """Add the statistics of classes to a method whose memory has a field `classes` for them."""

    def both(memory: Any, round_: Round, s: Settings) -> Learning:
        part, learned = trainable(round_), Learned(round_.posterior, memory)
        if part.tasks:
            learned = yield from learn(memory, part, s)
        return replace(learned, memory=counting(learned.memory, round_, s))

    return both


def trainable(round_: Round) -> Round:
    """The round without the rows of heads that have a single class: there is nothing to tell apart."""
    return round_.of([task for task in round_.tasks if round_.network.classes(task.head) > 1])


def counting(memory: M, round_: Round, s: Settings) -> M:
    """A memory with this round counted in its field `classes`, unless the settings want no likelihood per class."""
    if s.one_softmax or s.film:
        return memory
    most = PER_WEIGHT * round_.network.layout.size
    found: M = replace(memory, classes=counted(memory.classes, round_, most))  # type: ignore[attr-defined, type-var]
    return found


def _learn(memory: Statistics, round_: Round, s: Settings) -> Learning:
    found = counted(memory, round_)
    if not found.classes:
        raise EvclError("a likelihood per class cannot be learned from tokens, or from inputs of several shapes")
    return Learned(round_.posterior, found)
    yield  # a generator that requests no fit


GENERATIVE = Method(
    name="generative-classifier",
    summary=METHOD_SUMMARIES["generative-classifier"],
    bayesian=False,
    learn=_learn,
    memory=Statistics,
    settings={
        "film": replace(
            TRAINING["film"], refuses={"true": "it trains nothing, so FiLM's scales and shifts would never change"}
        )
    },
    log_joint=log_joint,
    generative=True,
    no_memory="it trains nothing, and forgets nothing",
    stages=0,
    shares="generative",
)


def _side(numbers: int) -> int:
    return (math.isqrt(8 * numbers + 1) - 1) // 2


def _square(flat: Tensor) -> Tensor:
    side = _side(len(flat))
    i, j = torch.triu_indices(side, side, device=flat.device)
    found = flat.new_zeros(side, side)
    found[i, j] = flat
    found[j, i] = flat
    return found


def _triangle(square: Tensor) -> Tensor:
    i, j = torch.triu_indices(len(square), len(square), device=square.device)
    return square[i, j]
