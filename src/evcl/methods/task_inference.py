"""Tell apart classes, and domains of the same classes, that were never learned together.

New classes: if a task has rows of half of its head's old classes at most, its new classes are learned in a softmax of
their own, a group of classes g,

    p(y | x) = p(g | x) p(y | x, g)

p(y | x, g) is the network's, trained and protected as if g were the head of another task: no old class is taught to be
silent. p(g | x) comes from a Gaussian likelihood per class, which forgets nothing (see generative.py).

New domains: a task of old classes whose inputs are of another kind, and whose labels follow another rule, would
overwrite what the softmax knows. It is a domain d of its head, with a softmax and likelihoods of its own, and

    p(y | x) = sum_d p(d | x) p(y | x, d)

Whether a task is one, its rows decide (see domains.py). Tasks of one distribution share one softmax. With the
setting `one_softmax`, a head always has one softmax over all its classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import Tensor

from evcl._core.settings import Setting, Settings
from evcl.methods import class_statistics
from evcl.methods.class_statistics import Statistics
from evcl.methods.counting import counted
from evcl.methods.domains import domains as judged
from evcl.methods.elastic_memory import Memory as ElasticMemory
from evcl.methods.method import Asked, Learned, Learning, Method, Newcomer, Round
from evcl.nn import Gaussian

PER_WEIGHT = 4  # beside a network, the matrix has at most this many numbers per weight: as many as EVCL itself keeps
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


def with_classes(method: Method) -> Method:
    """Add the likelihood per class to a method whose memory is that of EWC."""

    def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
        if not round_.likelihood.softmax:
            return (yield from method.learn(memory, round_, s))
        part, learned = trainable(round_), Learned(round_.posterior, memory)
        if part.tasks:
            learned = yield from method.learn(memory, part, s)
        return replace(learned, memory=counting(learned.memory, round_, s))

    settings = {**method.settings, "one_softmax": ONE_SOFTMAX}
    return replace(method, learn=learn, memory=Memory, log_joint=log_joint, domains=domains, settings=settings)


def log_joint(memory: Memory, q: Gaussian, asked: Asked) -> list[Tensor] | None:
    return class_statistics.log_joint(memory.classes, q, asked)


def domains(memory: Memory, q: Gaussian, asked: Asked, task: Newcomer) -> tuple[Tensor, Tensor] | None:
    return judged(memory.classes, q, asked, task)


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
