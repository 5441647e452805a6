"""What EWC, EVCL and their variants keep of earlier tasks, and the elastic term made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evcl._core.settings import Settings
from evcl.methods.importance import divisor
from evcl.methods.memory import per_head, per_layer, per_weight
from evcl.methods.method import Fitted, Round
from evcl.methods.teacher import Number, more_rows
from evcl.methods.terms import Elastic
from evcl.nn import Gaussian


@dataclass(frozen=True)
class Memory:
    """`prior`, the anchor, is the posterior at the end of the last task; for a new weight, it is the first prior."""

    prior: Gaussian = per_weight(Gaussian, "prior", merge="posterior")
    importance: Tensor = per_weight(low=0, merge="sum", decay="fisher_decay")  # F; 0 for weights with Kronecker factors
    used: Tensor = per_weight(low=0, high=1, merge="max")  # 1 for weights that an earlier task used, otherwise 0
    rows: dict[int, Tensor] = per_head(merge="sum")  # [R, 1]: number of rows it has learned from
    beta: dict[int, Tensor] = per_head(merge="mean")  # used by EVCL, as in VCL's memory
    factors: dict[str, tuple[Tensor, Tensor]] = per_layer()  # with importance=kfac, see kronecker.py

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
        rows = more_rows(self.rows, round_)
        used = torch.maximum(self.used, used)
        return replace(self, prior=fitted.q, importance=added, used=used, rows=rows, beta=dict(beta or {}))


def elastic(memory: Memory, s: Settings, n: int, part: Number = 1.0) -> Elastic:
    """`part` times lambda/2 sum F [(mu - mu*)^2 + (s2 - s2*)^2], with the floor added to lambda F. It is divided by n
    if `strength_scale` or `fisher_scale` is "examples".
    """
    importance = part * (s.strength * memory.importance + s.fisher_floor * memory.used)
    return Elastic(memory.prior, importance / divisor(n, s))
