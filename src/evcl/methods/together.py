"""Several methods in one program: each replica follows its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evcl.errors import EvclError
from evcl.methods.method import FinishedTask, Memory, Method
from evcl.methods.terms import Centred, Pull, Quadratic, Term
from evcl.nn import Gaussian
from evcl.settings import Settings

Rows = list[int]  # the replicas of one method


def together(methods: Sequence[Method]) -> Method:
    """The method of a program whose replica r follows `methods[r]`; all of one kind (Bayesian or not, joint or not)."""
    groups: dict[str, tuple[Method, Rows]] = {}
    for r, method in enumerate(methods):
        groups.setdefault(method.name, (method, []))[1].append(r)
    if len(groups) == 1:
        return methods[0]
    if len({(method.bayesian, method.joint, method.coreset_only) for method in methods}) > 1:
        raise EvclError(f"{' and '.join(groups)} are of different kinds and cannot share a program")

    def terms(memory: Memory, s: Settings, n: int) -> list[Term]:
        found: list[Term] = []
        for method, rows in groups.values():
            some = Memory(_rows(memory.prior, rows), memory.importance[rows], memory.used)
            for term in method.terms(some, _settings(s, rows), n):
                kind = QuadraticOf if isinstance(term, Quadratic) else TermOf
                found.append(kind(rows, term, memory.importance))
        return found

    def importance(task: FinishedTask) -> Tensor:
        total = torch.zeros_like(task.q.mean)
        for method, rows in groups.values():
            if method.importance is not None:
                total[rows] = method.importance(task)[rows]
        return total

    measured = any(method.importance is not None for method in methods)
    known = {name: setting for method in methods for name, setting in method.settings.items()}
    name = "+".join(groups)
    return replace(methods[0], name=name, terms=terms, importance=importance if measured else None, settings=known)


@dataclass(frozen=True)
class TermOf:
    """A term of some replicas; 0 for the others."""

    rows: Rows
    term: Any
    like: Tensor  # [R, P]

    def loss(self, q: Gaussian) -> Tensor:
        total = self.like.new_zeros(len(self.like))
        return total.index_add(0, torch.tensor(self.rows, device=total.device), self.term.loss(_rows(q, self.rows)))


class QuadraticOf(TermOf):
    """The others' springs have no stiffness."""

    def pull(self) -> Pull:
        pull = self.term.pull()
        return Pull(*(part and self._spread(part) for part in (pull.mean, pull.linear, pull.square)))

    def _spread(self, part: Centred) -> Centred:
        found = Centred(torch.zeros_like(self.like), torch.zeros_like(self.like))
        found.w[self.rows], found.c[self.rows] = part.w, part.c
        return found


def _rows(gaussian: Gaussian, rows: Rows) -> Gaussian:
    return Gaussian(gaussian.mean[rows], None if gaussian.log_std is None else gaussian.log_std[rows])


def _settings(s: Settings, rows: Rows) -> Settings:
    return Settings({name: value[rows] if isinstance(value, Tensor) else value for name, value in s.items()})
