"""The bank: groups of experts, the shares that they have, and the prediction that they make together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from evcl.streams.experts import Experts, Look
from evcl.streams.forgetting import Blend, Overtaking, Shares


class Looked(NamedTuple):
    """The look of each group, what all experts predict [R, n, ...], and what they predict together [1, n, ...]."""

    looks: list[Look]
    predicted: Tensor
    together: Tensor


class Bank:
    def __init__(self, groups: Sequence[Experts], blends: bool) -> None:
        self.groups = list(groups)
        count = sum(map(len, groups))
        self.shares = Shares(count)
        self.blend = Blend(count) if blends else None
        self.overtaking = [Overtaking(group.kept) for group in groups]

    def look(self, x: Tensor) -> Looked:
        looks = [group.look(x) for group in self.groups]
        predicted = torch.cat([look.predicted for look in looks])
        together = self.groups[0].observing.mixed(predicted, self.shares.shares)
        if self.blend is not None and predicted.shape[2] > 1:
            together = self.blend.predict(predicted).unsqueeze(0)
        return Looked(looks, predicted, together)

    def learn(self, looked: Looked, x: Tensor, y: Tensor, inner_steps: int) -> list[tuple[float, float]]:
        """Learn rows that the bank has looked at. Returns the memories (slow, fast) of experts where the slow one was
        replaced by a copy of the fast one.
        """
        each = torch.cat(
            [g.observing.log_likelihood(look.predicted, y) for g, look in zip(self.groups, looked.looks, strict=True)]
        )
        if self.blend is not None and looked.predicted.shape[2] > 1:
            self.blend.learn(looked.predicted, y)
        self.shares.learn(each)
        replaced = []
        own = each.split([len(group) for group in self.groups])
        for group, look, overtaking, likelihood in zip(self.groups, looked.looks, self.overtaking, own, strict=True):
            group.learn(look, x, y, inner_steps)
            for slow, fast in overtaking.learn(likelihood):
                group.filter.copy(slow, fast)
                replaced.append((group.memory(slow), group.memory(fast)))
        return replaced

    def grow(self, outputs: int) -> None:
        for group in self.groups:
            group.grow(outputs)

    def state(self) -> dict[str, Tensor]:
        found = {f"shares/{name}": t for name, t in self.shares.state().items()}
        if self.blend is not None:
            found |= {f"blend/{name}": t for name, t in self.blend.state().items()}
        for i, (group, overtaking) in enumerate(zip(self.groups, self.overtaking, strict=True)):
            found |= {f"{i}/{name}": t for name, t in (group.state() | overtaking.state()).items()}
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.shares.restore(part(state, "shares/"))
        if self.blend is not None:
            self.blend.restore(part(state, "blend/"))
        for i, (group, overtaking) in enumerate(zip(self.groups, self.overtaking, strict=True)):
            group.restore(part(state, f"{i}/"))
            overtaking.restore(part(state, f"{i}/"))


def part(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
