"""Environments that run side by side, and the adapter for those of gymnasium.

There are R * E of them, R replicas with E each; row r * E + e is environment e of replica r. Each episode starts from
a seed that is a function of (seed of the replica, purpose, environment, episode). So the state of an environment is
known from the number of its episode and the actions since its start, and no environment has to be saved itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.randomness import Purpose, generator

Picture = NDArray[np.uint8]


class Outcome(NamedTuple):
    """What one step of all environments gave, [B] each.

    Attributes:
        rewards: the rewards
        terminated: 1 where the episode ended in a final state, whose value is 0
        truncated: 1 where it was cut off, so that the last state still has a value
        last: [B, ...], the observations after the step; those of ended episodes are not yet those of new ones
    """

    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    last: Tensor

    @property
    def ended(self) -> Tensor:
        """1 where the episode ended for either reason."""
        return torch.maximum(self.terminated, self.truncated)


class Environments(Protocol):
    """Environments that run side by side. An environment whose episode ends begins the next one at once."""

    observations: Tensor  # [B, ...], float32, of the present states

    def step(self, actions: Tensor) -> Outcome:
        """Take the actions [B], or [B, D] if they are numbers."""
        ...

    def frame(self, row: int) -> Picture:
        """A picture [height, width, 3] of one environment, in bytes."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Everything that `load` needs to be in the same states again."""
        ...

    def load(self, tensors: dict[str, Tensor]) -> None: ...


Make = Callable[[Sequence[int], int, str, torch.device], Environments]
"""(seeds of the replicas, environments per replica, purpose, device) -> environments."""


class Gymnasium:
    """Environments with gymnasium's interface: `make()` creates one, which cuts off its episodes itself.

    An environment must do the same again after `reset(seed=...)` and the same actions. `draw(env)` is a picture of one;
    None: what it renders.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        seeds: Sequence[int],
        envs: int,
        purpose: str,
        device: torch.device,
        draw: Callable[[Any], Picture] | None = None,
    ) -> None:
        self.draw = draw
        self.all = [make() for _ in range(len(seeds) * envs)]
        self.seeds, self.envs, self.purpose, self.device = seeds, envs, purpose, device
        self.episode = torch.zeros(len(self.all), dtype=torch.long)  # the number of each environment's
        self.taken: list[list[Any]] = [[] for _ in self.all]  # the actions since each episode began
        self.observations = self._stacked([self._begun(i) for i in range(len(self.all))])

    def step(self, actions: Tensor) -> Outcome:
        rows, numbers, begun = [], [], {}
        for i, (env, action) in enumerate(zip(self.all, actions.tolist(), strict=True)):
            seen, reward, terminated, truncated, _ = env.step(_given(action, env.action_space))
            self.taken[i].append(action)
            rows.append(seen)
            numbers.append((float(reward), float(terminated), float(truncated and not terminated)))
            if terminated or truncated:
                self.episode[i] += 1
                self.taken[i] = []
                begun[i] = self._begun(i)
        last = self.observations = self._stacked(rows)
        if begun:
            self.observations = self._stacked([begun.get(i, row) for i, row in enumerate(rows)])
        rewards, terminated, truncated = torch.tensor(numbers, device=self.device).unbind(1)
        return Outcome(rewards, terminated, truncated, last)

    def frame(self, row: int) -> Picture:
        picture = self.all[row].render() if self.draw is None else self.draw(self.all[row])
        if picture is None:
            raise EvclError("this environment draws no pictures: make it with render_mode='rgb_array'")
        return np.asarray(picture)

    def tensors(self) -> dict[str, Tensor]:
        width = max(map(len, self.taken))
        shape = np.shape(next((one[0] for one in self.taken if one), 0))
        actions = np.zeros((len(self.all), width, *shape))
        for row, one in zip(actions, self.taken, strict=True):
            if one:
                row[: len(one)] = one
        length = torch.tensor([len(one) for one in self.taken])
        return {"episode": self.episode, "length": length, "actions": torch.from_numpy(actions)}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Begin the same episodes again, and take the same actions."""
        self.episode.copy_(tensors["episode"])
        now = []
        for i, env in enumerate(self.all):
            seen, whole = self._begun(i), bool(hasattr(env.action_space, "n"))
            taken = tensors["actions"][i, : int(tensors["length"][i])].tolist()
            self.taken[i] = [int(action) for action in taken] if whole else taken
            for action in self.taken[i]:
                seen, _, ended, cut, _ = env.step(_given(action, env.action_space))
                if ended or cut:
                    raise EvclError("an environment did something else after the same seed and actions: cannot resume")
            now.append(seen)
        self.observations = self._stacked(now)

    def _begun(self, i: int) -> NDArray[np.float32]:
        seen: NDArray[np.float32]
        r, e = divmod(i, self.envs)
        source = generator(self.seeds[r], Purpose.EPISODE.of(self.purpose), e, int(self.episode[i]))
        seen, _ = self.all[i].reset(seed=source.initial_seed() % 2**31)
        return seen

    def _stacked(self, rows: list[NDArray[np.float32]]) -> Tensor:
        return torch.from_numpy(np.stack(rows).astype(np.float32, copy=False)).to(self.device)


def _given(action: Any, space: Any) -> Any:
    """The action as the environment takes it: numbers are clipped to its space. The loss has those that were drawn."""
    if not isinstance(action, list):
        return action
    return np.clip(np.asarray(action, dtype=np.float32), space.low, space.high)
