"""Orders in which kept examples take part in a fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mixed:
    """Every example of the new tasks once; in each batch, a fraction `share` is drawn from earlier examples, with
    replacement. The last batch may be smaller, and has the same fraction.

    The fit's first `tasks` tasks are new; its other tasks hold the kept examples.
    """

    share: float
    tasks: int = 1

    def __call__(self, sizes: Sequence[int], batch: int, source: torch.Generator) -> Tensor:
        new, kept = sum(sizes[: self.tasks]), sum(sizes[self.tasks :])
        old = min(round(self.share * batch), batch - 1) if kept else 0
        pieces = torch.randperm(new, generator=source).split(batch - old)
        if not old:
            return torch.cat(pieces)
        drawn = torch.randint(new, new + kept, (len(pieces), old), generator=source)
        counts = [round(old * len(part) / (batch - old)) for part in pieces]
        return torch.cat([t for part, n, row in zip(pieces, counts, drawn, strict=True) for t in (part, row[:n])])


@dataclass(frozen=True)
class Interleaved:
    """Every example of the new tasks once, and as many earlier ones, drawn with replacement: new, kept, new, kept, ...

    The fit's first `tasks` tasks are new; the others hold the kept examples, `kinds` times over. Kept rows are drawn
    from the first copy, the second, ..., the first again, so that a step can use each copy in another way. `period` is
    the number of rows after which that order repeats: processes that share a batch split it at multiples of it.
    """

    tasks: int = 1
    kinds: int = 1

    @property
    def period(self) -> int:
        return 2 * self.kinds

    def __call__(self, sizes: Sequence[int], batch: int, source: torch.Generator) -> Tensor:
        new = sum(sizes[: self.tasks])
        kept = sum(sizes[self.tasks :]) // self.kinds
        fresh = torch.randperm(new, generator=source)
        drawn = torch.randint(new, new + kept, (new,), generator=source)
        place = torch.arange(new) % max(1, batch // 2)  # within its step
        return torch.stack([fresh, drawn + kept * (place % self.kinds)], 1).flatten()
