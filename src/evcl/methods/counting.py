"""Count a round in the statistics of classes, and hold out some of its rows to choose the temperature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl._core.randomness import Purpose, generator
from evcl.methods.class_statistics import (
    POOL_SIDE,
    ROWS_AT_ONCE,
    TEMPERATURES,
    Statistics,
    base,
    chunks,
    side_of,
    square,
    triangle,
    units,
)
from evcl.methods.data import TaskData
from evcl.methods.method import Round

MIN_FEATURES, MAX_FEATURES = 128, 1024  # D: as many as memory allows
COLUMNS_AT_ONCE = 256  # columns of the scatter that are computed at a time
FOLDS = 5  # a task holds out all of its rows, one fold at a time; of MAX_HELD or more, one fold; of 2 per fold, none
MAX_HELD = 1000  # rows
MAX_RIVALS = 1000  # classes that a held-out row is predicted among; of more, some are drawn


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
    orders = [task.drawn(round_.generators(Purpose.FOLDS, i)) for i, task in enumerate(tasks)]
    n = sum(order.shape[1] for order in orders)
    nll = statistics.common["nll"].clone()
    for fold in range(0 if n < 2 * FOLDS else FOLDS if n < MAX_HELD else 1):
        rest, held = statistics, []
        for task, order in zip(tasks, orders, strict=True):
            own = torch.arange(order.shape[1], device=order.device) % FOLDS == fold
            rest = added(rest, task, order[:, ~own], network.classes(task.head), round_.seeds)
            held.append((task, order[:, own]))
        certain = torch.full_like(nll, 1e9)  # of all temperatures but 1, so that T is 1
        certain[:, TEMPERATURES.index(1.0)] = -1e9
        rest = replace(rest, common={**rest.common, "nll": certain})
        for task, rows in held:
            nll += _nll(rest, task, rows[:, :MAX_HELD], round_)
        if n >= MAX_HELD:  # the rest is already counted
            statistics, orders = rest, [rows for _, rows in held]
    statistics = replace(statistics, common={**statistics.common, "nll": nll})
    for task, order in zip(tasks, orders, strict=True):
        statistics = added(statistics, task, order, network.classes(task.head), round_.seeds)
    changed = {task.head: round_.same(statistics.classes[task.head]) for task in tasks}
    common = {name: round_.same(one) for name, one in statistics.common.items()}
    return Statistics({**statistics.classes, **changed}, common)


def _first(x: Tensor, round_: Round, most: float) -> dict[str, Tensor]:
    """The centre and scale of the first task's inputs x [U, N, ...], and sums of no rows."""
    own = torch.arange(len(round_.seeds)) % len(x)
    flat = x.flatten(2)
    centre = flat.mean(1)
    scale = (flat - centre.unsqueeze(1)).square_().mean((1, 2)).sqrt().clamp_min(1e-12)
    common = {"centre": centre[own], "scale": scale[own].unsqueeze(1)}
    room = MAX_FEATURES if most >= MAX_FEATURES * (MAX_FEATURES + 1) / 2 else side_of(int(most))
    width = max(MIN_FEATURES, min(MAX_FEATURES, room))
    width -= width % POOL_SIDE**2
    own_width = flat.shape[2] + (flat.shape[2] % POOL_SIDE**2 == 0)
    if round_.network.base_features and own_width <= MAX_FEATURES:  # the matrix is small beside the base model
        width = own_width
    common["scatter"] = flat.new_zeros(len(own), width * (width + 1) // 2)
    common["nll"] = flat.new_zeros(len(own), len(TEMPERATURES))
    common["squares"] = flat.new_zeros(len(own), flat.shape[2])
    return common


def added(statistics: Statistics, task: TaskData, rows: Tensor, classes: int, seeds: Sequence[int]) -> Statistics:
    """Add the rows [R, n] of a task to its head, which has this many classes, piece by piece: sums of squares are about
    the mean, and merged exactly.
    """
    dtype = torch.float64 if task.x.is_cuda else task.x.dtype
    changed = {name: one.clone() for name, one in statistics.common.items() if name in ("scatter", "squares")}
    scatter = changed["scatter"]
    before = statistics.classes.get(task.head)
    width = side_of(scatter.shape[1])
    after = scatter.new_zeros(len(scatter), classes, 1 + width)
    if before is not None:
        after[:, : before.shape[1]] = before
    for r, seed in enumerate(seeds):
        own, total = r % len(task.x), square(scatter[r].to(dtype))
        for some in rows[r].split(ROWS_AT_ONCE):
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
        scatter[r] = triangle(total)
    return Statistics({**statistics.classes, task.head: after}, {**statistics.common, **changed})


def _add_squares(total: Tensor, rows: Tensor) -> None:
    """Add rows^T rows to the upper triangle of a matrix, in place. The lower one is not used, and has other values."""
    for i in range(0, len(total), COLUMNS_AT_ONCE):
        total[i : i + COLUMNS_AT_ONCE, i:].addmm_(rows[:, i : i + COLUMNS_AT_ONCE].T, rows[:, i:])


def _rivals(statistics: Statistics, head: int, round_: Round) -> list[int]:
    """The heads whose classes a held-out row of this head is predicted among: all of them or, if they have more than
    MAX_RIVALS classes, some that are drawn: so a round takes no longer with thousands of heads.
    """
    heads = list(statistics.classes)
    if sum(one.shape[1] for one in statistics.classes.values()) <= MAX_RIVALS:
        return heads
    order = torch.randperm(len(heads), generator=generator(0, Purpose.RIVALS, round_.number)).tolist()  # for all seeds
    rivals, count = {head}, statistics.classes[head].shape[1]
    for k in (heads[i] for i in order):
        count += 0 if k in rivals else statistics.classes[k].shape[1]
        if count > MAX_RIVALS:
            break
        rivals.add(k)
    return [k for k in heads if k in rivals]


def _nll(statistics: Statistics, task: TaskData, rows: Tensor, round_: Round) -> Tensor:
    """[R, temperatures]: the total NLL of these rows among all known classes, or many of them. The statistics' own T
    must be 1.
    """
    heads = _rivals(statistics, task.head, round_)
    start = sum(statistics.classes[k].shape[1] for k in heads[: heads.index(task.head)])
    own = torch.arange(len(rows), device=rows.device).unsqueeze(1) % len(task.x)
    weight, offset = statistics.classifier_of(heads)
    every = task.x.new_empty(*rows.shape, weight.shape[2])
    for r, first, f in chunks(statistics, task.x[own, rows], round_.seeds):
        every[r, first : first + len(f)] = torch.addmm(offset[r], f, weight[r])
    y = start + task.y[own, rows]
    nll = [
        F.cross_entropy((every / t).flatten(0, 1), y.flatten(), reduction="none").view(y.shape) for t in TEMPERATURES
    ]
    return torch.stack(nll, 2).nan_to_num(0.0, 0.0).sum(1)  # a row whose class has no other rows says nothing
