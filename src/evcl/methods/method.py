"""What a method is: which terms it adds to the mean NLL, and how it measures what a finished task needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evcl.errors import EvclError
from evcl.methods.terms import Elastic, Term
from evcl.nn import BayesianNetwork, Gaussian, Layout
from evcl.ranks import Ranks
from evcl.registry import Registry
from evcl.settings import BAYESIAN, CORESET, TRAINING, Setting, Settings


@dataclass(frozen=True)
class Memory:
    """What is remembered of the earlier tasks, for the weights in use: the trunk's and the active heads'.

    `prior` is the posterior at the end of the last task (for a new weight, the first prior): the anchor too.
    """

    prior: Gaussian
    importance: Tensor  # [R, P], the accumulated Fisher
    used: Tensor  # [P], 1 where an earlier task used the weight, 0 where not


@dataclass(frozen=True)
class FinishedTask:
    """A task that has just been learned, for measuring how much it needs each weight."""

    network: BayesianNetwork
    q: Gaussian  # [R, P], the posterior of the weights in use
    layout: Layout  # their names
    x: Tensor  # [R, n, ...]
    y: Tensor  # [R, n], positions in the head
    heads: Sequence[int]
    settings: Settings
    generators: Sequence[torch.Generator]  # one a replica
    weights: Tensor | None = None  # [R, n], what the examples count for; None: 1
    ranks: Ranks | None = None  # the processes that share the work, all of which have this task; None: there is one

    @property
    def mean(self) -> Tensor:
        return self.q.mean


def no_terms(memory: Memory, s: Settings, n: int) -> list[Term]:
    return []


@dataclass(frozen=True)
class Method:
    """A method of continual learning.

    name, summary   what it is called, and one line about it
    bayesian        a Gaussian over each weight; otherwise a point
    terms           (memory, settings, examples in the task) -> the terms added to the mean NLL
    importance      finished task -> [R, P], its need of each weight, accumulated as F <- decay F + F_t; or None
    settings        its settings beyond those of training and, if it is Bayesian, of every Bayesian method; one of
                    those with another default or other choices
    joint           trains on all tasks at once: not a continual learner but a ceiling
    coreset_only    trains on the tasks' coresets and nothing else, from the first weights, after each task
    """

    name: str
    summary: str
    bayesian: bool
    terms: Callable[[Memory, Settings, int], Sequence[Term]] = no_terms
    importance: Callable[[FinishedTask], Tensor] | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    joint: bool = False
    coreset_only: bool = False

    @property
    def known_settings(self) -> dict[str, Setting]:
        return {**TRAINING, **({**BAYESIAN, **CORESET} if self.bayesian else {}), **self.settings}


def elastic(memory: Memory, s: Settings, n: int) -> Elastic:
    """lambda/2 sum F [(mu - mu*)^2 + (s2 - s2*)^2], with lambda F raised by the floor; both over n, if so wished."""
    importance = s.strength * memory.importance + s.fisher_floor * memory.used
    return Elastic(memory.prior, importance / n if s.strength_scale == "examples" else importance)


METHODS: Registry[Method] = Registry("method")


def register(method: Method, *, overwrite: bool = False) -> Method:
    """Add a method of one's own: it then works in `evcl run`, in `Learner` and in the contract tests."""
    if not isinstance(method, Method):
        raise EvclError(
            f"register takes an evcl.methods.Method, not {type(method).__name__}; see docs/own-method.md for an example"
        )
    METHODS.add(method.name, method, overwrite=overwrite)
    return method


def get(method: str | Method) -> Method:
    """The method of this name, or the method itself."""
    return method if isinstance(method, Method) else METHODS[method]
