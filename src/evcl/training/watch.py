"""What the loops of training tell whoever saves them on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from evcl.training.run import State
    from evcl.training.task import Step


@dataclass(frozen=True)
class Mark:
    """Where `optimise` stands within an epoch; all else that it needs to go on is in the step's buffers."""

    epoch: int  # from 0
    batch: int  # steps taken in it
    total: Tensor  # [R], the sum of their examples' NLL
    noise: Sequence[Tensor] = ()  # the states of the replicas' generators; none: the epoch has ended


class Watch(Protocol):
    """Looks on while a run learns a round. `tuning`: the round is gone on with where its coresets are learned."""

    @property
    def tuning(self) -> bool: ...

    def stage(self, state: State, tuning: bool) -> None:
        """One of a round's stages begins; the run is as `state` says until it ends."""

    def begin(self, step: Step, sure: Tensor, epochs: int, batches: int) -> Mark | None:
        """Its epochs begin. If they are gone on with: puts `step` and `sure` [R] where they were, and says where."""

    def due(self) -> bool:
        """Asked after each step on a CPU, and after each epoch on a GPU: whether `save` should be called."""

    def save(self, mark: Mark) -> None: ...
