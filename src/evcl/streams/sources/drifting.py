"""How a generated stream changes: a sequence of concepts, and the rows at which one follows another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from evcl._core.errors import EvclError

DRIFT_KINDS = ("none", "sudden", "gradual", "recurring")


class Phase(NamedTuple):
    """Where each row [n] stands between two concepts: `mix` is 0 at `before` and 1 at `after`."""

    before: Tensor
    after: Tensor
    mix: Tensor

    def drawn(self, source: torch.Generator) -> Tensor:
        """One of both concepts for each row, `after` with probability `mix`."""
        new = torch.rand(self.mix.shape, generator=source, dtype=torch.float64) < self.mix
        return torch.where(new, self.after, self.before)


@dataclass(frozen=True)
class Drift:
    """`concepts[k]` is followed by `concepts[k + 1]` at row `at[k]`.

    With a `width`, the new concept takes over linearly, from `width / 2` rows before that row to `width / 2` after it.
    """

    concepts: tuple[int, ...] = (0,)
    at: tuple[int, ...] = ()
    width: int = 0

    def __post_init__(self) -> None:
        if len(self.at) != len(self.concepts) - 1 or list(self.at) != sorted(set(self.at)):
            raise EvclError(f"{len(self.concepts)} concepts need {len(self.concepts) - 1} rows in order, not {self.at}")
        gaps = [after - before for before, after in zip((0, *self.at), self.at, strict=False)]
        if self.width < 0 or any(gap < self.width for gap in gaps[1:]):
            raise EvclError(f"a change of width {self.width} must end before the next one begins: {self.at}")

    @property
    def kind(self) -> str:
        """One of KINDS."""
        if not self.at:
            return "none"
        if len(set(self.concepts)) < len(self.concepts):
            return "recurring"
        return "gradual" if self.width else "sudden"

    def phase(self, rows: Tensor) -> Phase:
        """The concepts of these rows [n]."""
        concepts = torch.tensor(self.concepts)
        if not self.at:
            return Phase(concepts[0].expand(len(rows)), concepts[0].expand(len(rows)), torch.zeros(len(rows)).double())
        at = torch.tensor(self.at)
        starts = at - self.width // 2
        k = torch.searchsorted(starts, rows, right=True)  # how many changes have begun
        last = (k - 1).clamp(min=0)
        mix = ((rows - starts[last] + 1).double() / max(self.width, 1)).clamp(0, 1)
        return Phase(concepts[last], concepts[k], torch.where(k > 0, mix, 0.0))


def drift(kind: str, rows: int, concepts: int, width: int | None = None) -> Drift:
    """A drift of this kind over `rows` rows, with changes at equal distances.

    none: the first concept. sudden: each concept once. gradual: the same, over `width` rows (half of the distance).
    recurring: the first two concepts in turn, four times.
    """
    if kind not in DRIFT_KINDS:
        raise EvclError(f"drift must be one of {', '.join(DRIFT_KINDS)}, not {kind!r}")
    if kind == "none":
        return Drift()
    order = (0, 1) * 4 if kind == "recurring" else tuple(range(concepts))
    every = rows // len(order)
    at = tuple(every * k for k in range(1, len(order)))
    return Drift(order, at, (every // 2 if width is None else width) if kind == "gradual" else width or 0)
