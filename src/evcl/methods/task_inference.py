"""Tell apart classes, and domains of the same classes, that were never learned together.

New classes: if a task has rows of half of its head's old classes at most, its new classes are learned in a softmax of
their own, a group of classes g,

    p(y | x) = p(g | x) p(y | x, g)

p(y | x, g) is the network's, trained and protected as if g were the head of another task: no old class is taught to be
silent. p(g | x) comes from a Gaussian likelihood per class, which forgets nothing (see generative.py).

New domains: a task of old classes whose inputs are of another kind, and whose labels follow another rule, would
overwrite what the softmax knows. It is a domain d of its head, with a softmax and likelihoods of its own, and

    p(y | x) = sum_d p(d | x) p(y | x, d)

Whether a task is one, its rows decide (see `domains`). Tasks of one distribution share one softmax. With the
setting `one_softmax`, a head always has one softmax over all its classes.

The machinery is in class_statistics.py (sums over rows, random features) and counting.py (a round is added to them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from evcl._core.randomness import Purpose, generator
from evcl._core.settings import Setting, Settings
from evcl.methods import class_statistics
from evcl.methods.class_statistics import Statistics, base, known_inputs, scores
from evcl.methods.counting import MAX_HELD, added, counted
from evcl.methods.data import TaskData
from evcl.methods.elastic_memory import Memory as ElasticMemory
from evcl.methods.method import Asked, Learned, Learning, Method, Newcomer, Round
from evcl.methods.parts import Part, Rules, rule
from evcl.nn import Gaussian

PER_WEIGHT = 4  # beside a network, the matrix has at most this many numbers per weight: as many as EVCL itself keeps
JUDGED_HEAD = -1  # the head under which a task of an unknown domain is counted while it is judged
M = TypeVar("M")
ONE_SOFTMAX = Setting(
    False,
    "whether a head always has one softmax over all its classes. Otherwise the new classes of a task that lacks half "
    "of the head's old classes, and a task whose inputs and labels are unlike those of earlier tasks, get a softmax of "
    "their own there, and a Gaussian likelihood per class tells which of them predicts an input",
)


@dataclass(frozen=True)
class Memory(ElasticMemory):
    """What EWC keeps, and the likelihood per class."""

    classes: Statistics = field(default_factory=Statistics)


@dataclass(frozen=True)
class Infer(Rules):
    """The rules of task inference: when a task of known classes is a new domain."""

    prefix: ClassVar[str] = "infer"
    varied: float = rule(
        0.1,
        "an input is new to a task if it varied less than this fraction as much in all earlier rows together",
        "ablated: with 0, a table whose months use other columns loses 36 points on its first month, in place of 3",
        high=1.0,
    )
    known: float = rule(
        0.5,
        "a known domain tells less than this fraction of what the task's own rows tell about its labels",
        "ablated: with 0.75, tables whose rule turns win up to 5 points and small ones whose rule stays lose up to 2",
        high=1.0,
    )


DEFAULTS = Infer()


def task_inference(rules: Infer = DEFAULTS) -> Part:
    """The likelihood per class, for a method whose memory is that of EWC."""

    def wrap(method: Method) -> Method:
        def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
            if not round_.likelihood.softmax:
                return (yield from method.learn(memory, round_, s))
            part, learned = trainable(round_), Learned(round_.posterior, memory)
            if part.tasks:
                learned = yield from method.learn(memory, part, s)
            return replace(learned, memory=counting(learned.memory, round_, s))

        return replace(method, learn=learn, memory=Memory, log_joint=log_joint, domains=domains)

    equation = "p(y | x) = sum_g p(g | x) p(y | x, g), p(g | x) from a Gaussian per class on random features"
    switch = {"one_softmax": ONE_SOFTMAX}
    return Part("task inference", equation, {"one_softmax": True, "film": True}, wrap, rules, switch)


def log_joint(memory: Memory, q: Gaussian, asked: Asked) -> list[Tensor] | None:
    return class_statistics.log_joint(memory.classes, q, asked)


@torch.no_grad()
def domains(memory: Memory, q: Gaussian, asked: Asked, task: Newcomer) -> tuple[Tensor, Tensor] | None:
    """Whether a task of known classes is a new domain [R], and the share of its rows that belong to each of the known
    ones [R, domains]. None if the statistics of one of the heads are unknown.

    Half of its rows, at most 1,000, are counted as classes of their own; the other half is judged. The task is a new
    domain if all are true:

        recognised:  p(own | x) > p(d | x) for each known domain d, for most rows
        unknown:     I(known) < 1/2 I(own) (`infer.known`), where NLL(d) = -log p(y | x, d) on average, and
                     I(d) = H(y) - NLL(d); for rows of a single class, whose entropy H(y) is 0, with log 2 in its place

        crowded:     half of the variance of its inputs, or more, is in inputs that varied before

    So a prediction can tell which domain an input is from, and the task's labels follow a rule that the known domains
    hardly know. Files of one distribution are not recognised: their rows are as likely under the earlier files. If a
    task uses other inputs, such as the columns of another product, no weight of these inputs has learned anything yet.
    So one softmax learns it without forgetting, and an input can not be taken for one of another domain.
    """
    statistics, rules = memory.classes, Infer.of(asked.settings)
    x = known_inputs(statistics, q, asked)
    if x is None:
        return None
    judged = [_judged(statistics, x[r % len(x)], asked, task, rules, r) for r in range(len(asked.seeds))]
    new, shares = zip(*judged, strict=True)
    return torch.stack(new), torch.stack(shares)


def _judged(
    statistics: Statistics, x: Tensor, asked: Asked, task: Newcomer, rules: Infer, r: int
) -> tuple[Tensor, Tensor]:
    part = rules.known[r] if isinstance(rules.known, Tensor) else rules.known
    seed, y = asked.seeds[r], task.y[r % len(task.y)]
    rows = (y >= 0).nonzero().flatten().cpu()
    rows = rows[torch.randperm(len(rows), generator=generator(seed, Purpose.DOMAIN, len(rows)))][: 2 * MAX_HELD].to(
        x.device
    )
    counted, judged = rows[::2], rows[1::2]
    alone = Statistics(
        {k: one[r : r + 1] for k, one in statistics.classes.items()},
        {name: one[r : r + 1] for name, one in statistics.common.items()},
    )
    size = 1 + max(max(some) for some in task.classes)
    own = TaskData(x.unsqueeze(0), y.unsqueeze(0), JUDGED_HEAD)
    alone = added(alone, own, counted.unsqueeze(0), size, [seed])
    *known, own_scores = (one[0] for one in scores(alone, [seed], x[judged].unsqueeze(0), [*asked.heads, JUDGED_HEAD]))
    count, y = 1 + max(task.domains), y[judged]
    of_domain = torch.stack([_total(known, [d == k for d in task.domains]) for k in range(count)], 1)
    label = torch.tensor([c for one, some in zip(known, task.classes, strict=True) for c in some[: one.shape[1]]])
    right = torch.cat(known, 1).masked_fill(label.to(y.device) != y.unsqueeze(1), -math.inf).logsumexp(1)
    by_known = right - of_domain.logsumexp(1)
    by_own = own_scores.log_softmax(1).gather(1, y.unsqueeze(1)).squeeze(1)
    frequency = torch.bincount(y, minlength=size).to(x) / max(1, len(y))
    nll = -torch.stack([by_known, by_own])
    nll = nll[:, nll.isfinite().all(0)].mean(1)  # a row whose class has no other rows says nothing
    entropy = torch.special.entr(frequency).sum()
    info = torch.where(entropy > 0, entropy, math.log(2)) - nll
    unknown = info[0] < part * info[1]
    mine = (own_scores.logsumexp(1) > of_domain.amax(1)).sum()
    recognised = 2 * mine > len(judged)
    crowded = ~uses_new_inputs(statistics, x[rows], task.y.shape[1], r, rules)
    return recognised & unknown & crowded, of_domain.softmax(1).sum(0)


def _total(scores: Sequence[Tensor], wanted: Sequence[bool]) -> Tensor:
    """[N]: log p(x) up to a constant, over the classes of the heads that are wanted."""
    return torch.cat([one for one, use in zip(scores, wanted, strict=True) if use], 1).logsumexp(1)


def uses_new_inputs(statistics: Statistics, x: Tensor, n: int, r: int, rules: Infer) -> Tensor:
    """Whether most of the variance of a task with n rows, of which x are some, is in inputs that are new to it. False
    if the variances of earlier rows are unknown.
    """
    if "squares" not in statistics.common:
        return torch.tensor(False, device=x.device)
    least = rules.varied[r] if isinstance(rules.varied, Tensor) else rules.varied
    variance = x.flatten(1).var(0, correction=0)
    new = statistics.common["squares"][r] < least * n * variance
    return 2 * (variance * new).sum() > variance.sum()


@torch.no_grad()
def trusted(memory: Memory, round_: Round, s: Settings) -> Tensor | float:
    """[R, 1]: 0 if the round's rows use new inputs: what a teacher says of these is arbitrary. Otherwise 1."""
    statistics, mean = memory.classes, round_.posterior.mean
    every = []
    for i, task in enumerate(round_.tasks if statistics.classes else ()):
        rows = task.drawn(round_.generators(Purpose.FOLDS, i))[:, :MAX_HELD]
        x = base(round_.network, mean, task.take(rows)[0])
        if math.prod(x.shape[2:]) == statistics.common["centre"].shape[1]:
            every.append(x)
    if not every:
        return 1.0
    x = torch.cat(every, 1)
    new = [uses_new_inputs(statistics, x[r % len(x)], round_.n, r, Infer.of(s)) for r in range(len(mean))]
    return round_.same(1 - torch.stack(new).view(-1, 1).to(mean))


def trainable(round_: Round) -> Round:
    """The round without the rows of heads that have a single class: there is nothing to tell apart."""
    return round_.of([task for task in round_.tasks if round_.network.classes(task.head) > 1])


def counting(memory: M, round_: Round, s: Settings) -> M:
    """A memory with this round counted in its field `classes`, unless the settings want no likelihood per class."""
    if s.one_softmax or s.film:
        return memory
    most = PER_WEIGHT * round_.network.layout.size
    updated: M = replace(memory, classes=counted(memory.classes, round_, most))  # type: ignore[attr-defined, type-var]
    return updated
