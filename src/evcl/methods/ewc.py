"""Elastic weight consolidation (Kirkpatrick et al., 2017), in its online form: one anchor, the accumulated Fisher.

L_t = mean NLL + lambda/2 sum_i F_i (theta_i - theta*_i)^2
"""

from __future__ import annotations

from torch import Tensor

from evcl.curvature import fisher
from evcl.methods.method import FinishedTask, Memory, Method, elastic
from evcl.methods.terms import Term
from evcl.settings import ELASTIC, Settings


def terms(memory: Memory, s: Settings, n: int) -> list[Term]:
    return [elastic(memory, s)]


def importance(task: FinishedTask) -> Tensor:
    """The diagonal Fisher at the weights, or at the posterior's means."""
    kind, generators = task.settings.fisher, task.generators
    return fisher(task.network, task.mean, task.layout, task.x, task.y, task.heads, kind, generators)


EWC = Method(
    name="ewc",
    summary="plain weights, held where the Fisher says that earlier tasks need them",
    bayesian=False,
    terms=terms,
    importance=importance,
    settings=ELASTIC,
)
