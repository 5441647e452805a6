"""What EWC, EVCL and their variants keep of earlier tasks, and the elastic term made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from evcl._core.settings import Settings
from evcl.methods.importance import divisor, fisher
from evcl.methods.memory import per_head, per_layer, per_weight
from evcl.methods.method import Fitted, Round, Tracker, more_rows
from evcl.methods.terms import Number, Spring, Springs, Term
from evcl.nn import Gaussian
from evcl.posterior.kronecker import Factors, with_inputs


@dataclass(frozen=True)
class Memory:
    """`prior`, the anchor, is the posterior at the end of the last task; for a new weight, it is the first prior."""

    prior: Gaussian = per_weight(Gaussian, "prior", merge="posterior")
    importance: Tensor = per_weight(low=0, merge="sum", decay="fisher_decay")  # F; 0 for weights with Kronecker factors
    used: Tensor = per_weight(low=0, high=1, merge="max")  # 1 for weights that an earlier task used, otherwise 0
    rows: dict[int, Tensor] = per_head(merge="sum")  # [R, 1]: number of rows it has learned from
    beta: dict[int, Tensor] = per_head(merge="mean")  # used by EVCL, as in VCL's memory
    factors: Factors = per_layer(with_inputs)  # with importance=kfac, see kronecker.py

    def units(self) -> dict[int, Tensor]:
        """What the precision of each head, and of the trunk, is divided by: see `evcl.merge`."""
        return self.beta

    @staticmethod
    def lasting(s: Settings) -> str:
        return "the factors of layers" if s.get("importance") == "kfac" else ""

    def after(
        self, fitted: Fitted, round_: Round, importance: Tensor, decay: Number, beta: Mapping[int, Tensor] | None = None
    ) -> Memory:
        """The memory after one more round; only entries of the weights that the round used change."""
        used = fitted.used.expand_as(self.used)
        added = torch.where(used > 0, decay * self.importance + importance, self.importance)
        rows, used = more_rows(self.rows, round_), torch.maximum(self.used, used)
        return replace(self, prior=fitted.q, importance=added, used=used, rows=rows, beta=dict(beta or {}))


@dataclass(frozen=True)
class Elastic:
    """1/2 sum_p importance_p [(mu_p - mu*_p)^2 + (s2_p - s2*_p)^2]; for point weights, without the second square.

    `variances` is the importance of the second square, if it is another.
    """

    anchor: Gaussian
    importance: Tensor
    variances: Tensor | None = None
    name: ClassVar[str] = "elastic"

    def loss(self, q: Gaussian) -> Tensor:
        moved = self.importance * (q.mean - self.anchor.mean).square()
        variance, anchored = q.variance(), self.anchor.variance()
        if variance is not None and anchored is not None:
            second = self.importance if self.variances is None else self.variances
            moved = moved + second * (variance - anchored).square()
        return 0.5 * moved.sum(1)

    def springs(self) -> Springs:
        """a = importance, d = 2 importance; the centres are the anchor's means and variances."""
        variance = self.anchor.variance()
        mean, second = Spring(self.importance, self.anchor.mean), self.variances
        second = self.importance if second is None else second
        return Springs(mean) if variance is None else Springs(mean, square=Spring(2 * second, variance))


def elastic(memory: Memory, s: Settings, n: int, part: Number = 1.0) -> Elastic:
    """`part` times lambda/2 sum F [(mu - mu*)^2 + (s2 - s2*)^2], with the floor added to lambda F. It is divided by n
    if `strength_scale` or `fisher_scale` is "examples".
    """
    importance = part * (s.strength * memory.importance + s.fisher_floor * memory.used)
    return Elastic(memory.prior, importance / divisor(n, s))


@dataclass(frozen=True)
class Importance:
    """A measure of importance, and the penalty that is made of it.

    Attributes:
        measure: called after the fit of a task; [R, P] over all weights, at least 0, and 0 for weights that the fit did
            not use
        trackers: makes the trackers that the fit needs; `measure` finds their results in `fitted.tracked`
    """

    measure: Callable[[Fitted, Round, Settings], Tensor]
    trackers: Callable[[], Sequence[Tracker]] = tuple

    def penalty(self, memory: Memory, s: Settings, round_: Round, part: Number = 1.0) -> list[Term]:
        """The elastic terms of a fit, `part` times as strong."""
        return [elastic(memory, s, round_.n, part)]

    def means(self, memory: Memory, round_: Round) -> Tensor | None:
        """[R, P]: the fraction of the KL term's pull on the means that is left beside this penalty; None: all of it."""
        return None

    def remembered(
        self, memory: Memory, fitted: Fitted, round_: Round, s: Settings, beta: Mapping[int, Tensor] | None = None
    ) -> Memory:
        """The memory after a round, with the importance of its tasks."""
        return memory.after(fitted, round_, self.measure(fitted, round_, s), s.fisher_decay, beta)


FISHER = Importance(fisher)
