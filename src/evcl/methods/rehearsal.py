"""A memory of examples for rehearsal, and experience replay, which needs nothing else.

ER (Chaudhry et al., 2019; Rolnick et al., 2019): each step has a batch of the new task and as many kept rows,

    L_t = 1/2 mean NLL of the new rows + 1/2 mean NLL of the kept rows, each through its own head

`memory` is the number of rows kept, of all tasks together. `memory_policy` chooses them:

    balanced    equally many of each class and, within a class, of each task that has it; without classes, of each task
    reservoir   every row seen so far is kept with the same probability (Vitter, 1985)

The rows of a task are kept in random order, so that dropping the last ones drops rows at random. How many rows a task
keeps does not depend on the seed: replicas that train side by side keep equally many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evcl._core.devices import double
from evcl._core.errors import EvclError
from evcl._core.randomness import Purpose, generator
from evcl._core.settings import Setting, Settings
from evcl.methods.data import TaskData, shuffled
from evcl.methods.distillation import of_inner, teach, with_fits
from evcl.methods.memory import examples, per_task
from evcl.methods.method import Fit, Learned, Learning, Loss, Method, Round
from evcl.methods.naive import NAIVE
from evcl.methods.parts import Part, without
from evcl.methods.samplers import Mixed
from evcl.methods.terms import Number

ALL_ROWS_KEY = -1  # the key of the number of all rows, in a dict by place
REHEARSAL: dict[str, Setting] = {
    "memory": Setting(200, "number of examples kept, of all tasks together", high=100_000_000),
    "memory_policy": Setting(
        "balanced",
        "which examples are kept: equally many of each class and, within a class, of each task (balanced); or every "
        "example seen so far with the same probability (reservoir; how many of a task, is drawn once for all seeds)",
        choices=("balanced", "reservoir"),
    ),
}

KEPT = Part("rehearsal", "the kept rows of earlier tasks join the rows of each step", {"memory": 0})


@dataclass(frozen=True)
class Rehearsal:
    """The kept rows of each task that still has any, and how many rows of each class these tasks had."""

    kept: tuple[TaskData, ...] = examples()
    rows: dict[int, Tensor] = per_task()  # place in `kept` -> [R, C]; ALL_ROWS_KEY -> [R, 1]

    def recalled(self, round_: Round) -> tuple[TaskData, ...]:
        """The kept rows, to train on beside those of this round; refuse a round whose rows they cannot join."""
        if not round_.likelihood.keeps_rows:
            raise EvclError("a memory of examples needs class labels: use a method without one for other targets")
        shapes = list(dict.fromkeys(tuple(task.x.shape[2:]) for task in (*self.kept, *round_.tasks)))
        if len(shapes) > 1:
            raise EvclError(f"a memory needs inputs of one shape, but {shapes[-1]} follows {shapes[0]}")
        return self.kept

    def after(self, round_: Round, s: Settings) -> Rehearsal:
        """The memory after one more round."""
        return self.keeping(chosen(self, round_, s), round_)

    def keeping(self, found: Sequence[tuple[TaskData, Tensor]], round_: Round) -> Rehearsal:
        """The memory with these rows of the tasks, as `chosen` returns them."""
        kept = tuple(task.select(rows) for task, rows in found)
        known = {id(task): self.rows[i] for i, task in enumerate(self.kept)}
        count = len(round_.seeds)
        rows = {
            i: known[id(task)]
            if id(task) in known
            else class_counts(as_class(task), _classes(round_)(task.head), count)
            for i, (task, _) in enumerate(found)
        }
        seen = torch.full((count, 1), _seen(self) + round_.n, device=round_.posterior.mean.device)
        return Rehearsal(kept, {**rows, ALL_ROWS_KEY: seen})


def as_class(task: TaskData) -> TaskData:
    """The task with its classes or, if its targets are no classes, with all rows in one class of its own head."""
    if task.y.dim() == 2 and not task.y.is_floating_point():
        return task
    return replace(task, y=torch.zeros(task.y.shape[:2], dtype=torch.long, device=task.y.device))


def _classes(round_: Round) -> Callable[[int], int]:
    """The number of classes of a head."""
    return round_.network.classes if round_.likelihood.heads else lambda head: 1


def class_counts(task: TaskData, classes: int, replicas: int) -> Tensor:
    """[R, C]: the number of rows of each class."""
    counts = torch.stack([torch.bincount(y, minlength=classes) for y in task.y])
    return counts.repeat(replicas // len(counts), 1)


def _seen(memory: Rehearsal) -> int:
    return int(memory.rows[ALL_ROWS_KEY][0]) if memory.rows else 0


def chosen(memory: Rehearsal, round_: Round, s: Settings) -> list[tuple[TaskData, Tensor]]:
    """The rows [R, m] to keep of the tasks kept so far and of the new ones; tasks that keep no rows are left out."""
    count, device = len(round_.seeds), round_.posterior.mean.device
    tasks = [*memory.kept, *round_.tasks]
    orders = [torch.arange(task.y.shape[1], device=device).expand(count, -1) for task in memory.kept]
    orders += [task.drawn(round_.generators(Purpose.MEMORY, i)) for i, task in enumerate(round_.tasks)]
    source = generator(0, Purpose.MEMORY, round_.number)  # the same for every seed
    sizes = [task.y.shape[1] for task in tasks]
    if s.memory_policy == "reservoir":
        every = [task.n for task in tasks]
        counts = reservoir(every, len(memory.kept), _seen(memory), s.memory, source)
        picked = [order[:, :m] for order, m in zip(orders, counts, strict=True)]
    else:
        classified = [as_class(task) for task in tasks]
        labels = [_labels(task, order) for task, order in zip(classified, orders, strict=True)]
        shares = class_shares(classified, _classes(round_))
        counts = filled(sizes, [float(share.sum()) for share in shares], s.memory, source)
        picked = [
            order.gather(1, by_class(y, share)[:, :m])
            for order, y, share, m in zip(orders, labels, shares, counts, strict=True)
        ]
    return [(task, rows) for task, rows in zip(tasks, picked, strict=True) if rows.shape[1]]


def _labels(task: TaskData, rows: Tensor) -> Tensor:
    """[R, m]"""
    return task.y[torch.arange(len(rows), device=rows.device).unsqueeze(1) % len(task.y), rows]


def reservoir(sizes: Sequence[int], old: int, seen: int, most: int, source: torch.Generator) -> list[int]:
    """How many rows each task keeps. The first `old` tasks are kept ones, of `seen` rows; the others are new.

    The kept rows are a uniform sample of those seen. So the number of them that stay is that of rows seen earlier in a
    uniform sample of all rows.
    """
    new = sizes[old:]
    stay, *added = hypergeometric([seen, *new], min(most, seen + sum(new)), source)
    return [*hypergeometric(sizes[:old], min(stay, sum(sizes[:old])), source), *added]


def hypergeometric(sizes: Sequence[int], draws: int, source: torch.Generator) -> list[int]:
    """How many rows of each of these groups are in a uniform sample of `draws` of all rows, without replacement."""
    counts, rest = [], sum(sizes)
    for size in sizes:
        rest -= size
        few, many = max(0, draws - rest), min(size, draws)
        k = torch.arange(few, many + 1, dtype=torch.float64)
        ways = -sum(torch.lgamma(n + 1) for n in (k, size - k, draws - k, rest - draws + k))
        drawn = torch.rand((), dtype=torch.float64, generator=source)
        place = int(torch.searchsorted(torch.softmax(torch.as_tensor(ways), 0).cumsum(0), drawn))
        counts.append(min(few + place, many))
        draws -= counts[-1]
    return counts


def class_shares(tasks: Sequence[TaskData], classes: Callable[[int], int]) -> list[Tensor]:
    """[C] per task: the part of a class's rows that come from this task. Tasks that have the class have equal parts."""
    present = [double(torch.bincount(task.y.flatten(), minlength=classes(task.head)) > 0) for task in tasks]
    total: dict[int, Tensor] = {}
    for task, own in zip(tasks, present, strict=True):
        total[task.head] = total.get(task.head, torch.zeros_like(own)) + own
    return [own / total[task.head].clamp_min(1) for task, own in zip(tasks, present, strict=True)]


def by_class(y: Tensor, share: Tensor) -> Tensor:
    """[R, m]: the places of the labels y [R, m] in an order whose first rows are divided among the classes in
    proportion to `share` [C], as far as there are enough rows of each.
    """
    device, y = y.device, y.to(share.device)
    nth = torch.zeros_like(y)
    for c in share.nonzero().flatten().tolist():
        of = y == c
        nth += of * of.cumsum(1)
    return ((nth - 0.5) / share[y]).argsort(dim=1, stable=True).to(device)


def filled(have: Sequence[int], shares: Sequence[float], most: int, source: torch.Generator) -> list[int]:
    """How many rows each task keeps: `most` in all, in proportion to `shares`, as far as it has them. Numbers are
    rounded so that the sum is right; equal remainders are rounded up at random.
    """
    counts, left, rest = [0] * len(have), min(most, sum(have)), [k for k, n in enumerate(have) if n]
    while rest:
        each = left / sum(shares[k] for k in rest)
        short = [k for k in rest if have[k] <= each * shares[k]]
        if not short:
            break
        for k in short:
            counts[k], left = have[k], left - have[k]
        rest = [k for k in rest if k not in short]
    if not rest:
        return counts
    exact = {k: each * shares[k] for k in rest}
    counts = [math.floor(exact[k] + 1e-9) if k in exact else n for k, n in enumerate(counts)]
    missing = min(most, sum(have)) - sum(counts)
    mixed = [rest[i] for i in torch.randperm(len(rest), generator=source).tolist()]
    for k in sorted(mixed, key=lambda k: round(counts[k] - exact[k], 6))[:missing]:
        counts[k] += 1
    return counts


# --- methods ---------------------------------------------------------------------------------------------------------


def replaying(fit: Fit, kept: Sequence[TaskData], s: Settings) -> Fit:
    """A fit on the round's tasks, with as many kept rows as new ones in each step."""
    if not kept:
        return fit
    return replace(fit, data=[*fit.data, *kept], sampler=Mixed(0.5, len(fit.data)), batch=2 * s.batch_size)


def weighted(task: TaskData, factor: Number) -> TaskData:
    """The task with the weights of its rows multiplied by a number, or by [R, 1] for R replicas."""
    own = task.counts
    if not isinstance(factor, Tensor) or len(own) == len(factor):
        return replace(task, weights=factor * own)
    x, y = (one.repeat(len(factor) // len(one), *[1] * (one.dim() - 1)) for one in (task.x, task.y))
    return replace(task, x=x, y=y, weights=factor * own.repeat(len(factor) // len(own), 1))


def with_memory(method: Method, **changes: Any) -> Method:
    """Add a memory of examples to a method: the kept rows join the data of its fits. A distillation loss uses them as
    inputs, too. Everything else, such as the Fisher, is measured on the new rows as before.
    """
    memory = make_dataclass(
        "Memory", [("inner", method.memory, field()), ("rehearsal", Rehearsal, field())], frozen=True
    )

    def learn(remembered: Any, round_: Round, s: Settings) -> Learning:
        kept = remembered.rehearsal.recalled(round_)

        def replayed(fit: Fit) -> Fit:
            return replaying(_with_inputs(fit, kept, round_, method.name), kept, s)

        learned = yield from with_fits(method.learn(remembered.inner, round_, s), replayed)
        return Learned(learned.posterior, memory(learned.memory, remembered.rehearsal.after(round_, s)))

    predictor, structure = of_inner(method.predictor), of_inner(method.structure)
    wrapped = replace(method, memory=memory, learn=learn, predictor=predictor, structure=structure, log_joint=None)
    return replace(wrapped, **{"parts": [*without(method, "task inference"), KEPT], **changes})


def _with_inputs(fit: Fit, kept: Sequence[TaskData], round_: Round, name: str) -> Fit:
    """The fit with the teacher's outputs on the kept rows; refuse a fit that kept rows cannot join."""
    own = len(fit.data) == len(round_.tasks) and all(a is b for a, b in zip(fit.data, round_.tasks, strict=True))
    if not own or fit.sampler is not shuffled or fit.model is not None or fit.rule is not None:
        raise EvclError(f"{name} cannot have a memory: its fits do not simply train on the rows of the new task")
    losses: list[Loss] = []
    for loss in fit.losses:
        taught = loss.taught()
        if taught is None:
            raise EvclError(f"{name} cannot have a memory: it has losses that are not known for kept rows")
        if kept:
            strengths = dict(zip(taught.heads, taught.strength, strict=True))
            losses += teach([*round_.tasks, *kept], round_, taught.temperature, strengths)
    return replace(fit, losses=losses) if kept else fit


ER = with_memory(NAIVE, name="er", summary="", settings=REHEARSAL)
