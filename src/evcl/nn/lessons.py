"""Distillation inside a chain's training pass: see chain.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from evcl._core.randomness import Noise


class Lessons(NamedTuple):
    """The distillation loss sum_k w_k T^2 mean_b KL(q || softmax(z_k / T)), with q the teacher's probabilities.

    The columns C are those of the chain's last layer: the heads of the data, then the heads that are only distilled.
    """

    q: Tensor  # [U, N, C], 0 for columns that are not distilled; replica r uses row r mod U
    told: Tensor  # [U, N, K]: sum q log q of each distilled head
    spans: Tensor  # [K, 2]: first and end column of each distilled head
    temperature: Tensor  # [R]
    strengths: Tensor  # [R, K], or [R, N, K] for each example its own
    own: int  # number of columns of the data's heads
    value: Tensor  # [R]: where a chain writes the value of the loss


class LessonPass:
    """Distillation in plain torch operations, used where native.c's `loss_and_lessons` is not available; also draws the
    noise of the last layer.
    """

    def __init__(self, of: Lessons, z: Tensor) -> None:
        self.of, self.z, self.q, self.told = of, z, torch.empty_like(z), z.new_empty(*z.shape[:2], len(of.spans))
        teachers = [r % len(of.q) for r in range(len(z))]
        self.strengths = of.strengths.unsqueeze(1) if of.strengths.dim() == 2 else torch.empty_like(self.told)
        self.parts = [[(of.q[u], self.q[r]), (of.told[u], self.told[r])] for r, u in enumerate(teachers)]
        if of.strengths.dim() == 3:
            for part, strengths, out in zip(self.parts, of.strengths, self.strengths, strict=True):
                part.append((strengths, out))
        self.heads = [slice(*span) for span in of.spans.tolist()]
        some = of.strengths.ne(0).flatten(1).any(1)
        self.rows = [rows.nonzero().flatten() for rows in (some, ~some)]  # replicas with distillation, and without
        self.drawn: list[tuple[Tensor, list[Tensor]]] = []
        self.noises: tuple[Noise, list[Noise]] | None = None

    def draw(self, noise: Noise, out: Tensor) -> Tensor:
        """Draw the noise. A replica without distillation draws the same numbers whether or not others have it."""
        if len(self.rows[0]) == len(out) or self.of.own == out.shape[2]:
            return noise.normal_(out)
        if not self.drawn:
            out.zero_()
            for rows, columns in zip(self.rows, (out.shape[2], self.of.own), strict=True):
                places = [out[r, :, :columns] for r in rows.tolist()]
                self.drawn.append((out.new_empty(len(rows), out.shape[1], columns), places))
        if self.noises is None or self.noises[0] is not noise:
            self.noises = noise, [noise.of(rows) for rows in self.rows]
        for own, (numbers, places) in zip(self.noises[1], self.drawn, strict=True):
            for place, part in zip(places, own.normal_(numbers), strict=True):
                place.copy_(part)
        return out

    def take(self, z: Tensor, rows: Tensor) -> None:
        """Store a batch's logits, divided by the temperature, and look up the teacher's probabilities for it."""
        torch.div(z, self.of.temperature.view(-1, 1, 1), out=self.z)
        for part, own in zip(self.parts, rows, strict=True):
            for every, out in part:
                torch.index_select(every, 0, own, out=out)

    def add_gradient(self, g: Tensor) -> None:
        """Add the gradient to `g`, that of the mean NLL, and store the value of the loss."""
        value, warm, n = self.of.value.zero_(), self.of.temperature, g.shape[1]
        for columns, told, strength in zip(self.heads, self.told.unbind(2), self.strengths.unbind(2), strict=True):
            log_p, q = self.z[..., columns].log_softmax(2), self.q[..., columns]
            value += (strength * (told - (q * log_p).sum(2))).sum(1)
            g[..., columns] += (strength * warm.view(-1, 1) / n).unsqueeze(2) * (log_p.exp() - q)
        value.mul_(warm.square() / n)
