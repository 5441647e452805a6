"""CartPole in torch: all environments in one tensor, with exactly the dynamics of gymnasium's CartPole-v1.

Ours, because gymnasium's steps one environment at a time, and its vector form has one gravity, length and force for
all. `tests/rl/test_cartpole.py` compares the two state by state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from evcl.rl.environments import Environments, Episodes, Outcome

CART, POLE, SECONDS = 1.0, 0.1, 0.02  # masses, and time between two states
FAR, TILTED = 2.4, 12 * 2 * math.pi / 360  # where an episode fails
LONGEST = 500  # steps of an episode


class Variant(NamedTuple):
    """A CartPole: `length` is half of the pole's, and a negative `force` swaps left and right."""

    gravity: float = 9.8
    length: float = 0.5
    force: float = 10.0

    def make(self, seeds: Sequence[int], envs: int, purpose: str, device: torch.device) -> Environments:
        """The environments of this variant: a `Make`."""
        return CartPole(self, seeds, envs, purpose, device)


class CartPole:
    """Environments of one variant. The state is [B, 4]: position, speed, angle, angular speed, in float64."""

    def __init__(self, variant: Variant, seeds: Sequence[int], envs: int, purpose: str, device: torch.device) -> None:
        self.variant, self.episodes = variant, Episodes(seeds, envs, purpose)
        rows = len(seeds) * envs
        self.state = torch.empty(rows, 4, dtype=torch.float64, device=device)
        self.age = torch.zeros(rows, dtype=torch.long, device=device)
        self._begin(range(rows))
        self.observations = self.state.float()

    def step(self, actions: Tensor) -> Outcome:
        self.state = moved(self.state, actions, self.variant)
        self.age += 1
        x, _, angle, _ = self.state.unbind(1)
        terminated = (x.abs() > FAR) | (angle.abs() > TILTED)
        truncated = (self.age >= LONGEST) & ~terminated
        last = self.observations = self.state.float()
        ended = (terminated | truncated).nonzero().flatten().tolist()
        if ended:
            self.state = self.state.clone()
            self.episodes.number[ended] += 1
            self._begin(ended)
            self.observations = self.state.float()
        return Outcome(torch.ones_like(last[:, 0]), terminated.float(), truncated.float(), last)

    def _begin(self, rows: Sequence[int]) -> None:
        for row in rows:
            start = torch.empty(4, dtype=torch.float64).uniform_(-0.05, 0.05, generator=self.episodes.source(row))
            self.state[row] = start.to(self.state.device)
            self.age[row] = 0

    def frame(self, row: int) -> Any:
        """A picture [60, 150, 3] of one environment."""
        x, _, angle, _ = self.state[row].tolist()
        down, right = np.mgrid[0:60, 0:150]
        px, py = (right - 75) * 2 * FAR / 130, (48 - down) * 2 * FAR / 130  # in metres from the middle of the track
        picture = np.full((60, 150, 3), 255, np.uint8)
        picture[np.abs(py) < 0.02] = 170
        along, long = (px - x) * math.sin(angle) + py * math.cos(angle), 2 * self.variant.length
        across = np.abs((px - x) * math.cos(angle) - py * math.sin(angle))
        picture[(np.abs(px - x) < 0.25) & (np.abs(py) < 0.1)] = (40, 40, 40)
        picture[(across < 0.05) & (along > 0) & (along < long)] = (200, 120, 60)
        return picture

    def tensors(self) -> dict[str, Tensor]:
        return {"episode": self.episodes.number, "state": self.state, "age": self.age}

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.episodes.number.copy_(tensors["episode"])
        self.state, self.age = tensors["state"].to(self.state), tensors["age"].to(self.age)
        self.observations = self.state.float()


def moved(state: Tensor, actions: Tensor, variant: Variant) -> Tensor:
    """[B, 4]: the states after one step with the actions [B], 0 (left) or 1 (right)."""
    x, speed, angle, turning = state.unbind(1)
    force = variant.force * (2 * actions.to(state) - 1)
    cos, sin, whole = angle.cos(), angle.sin(), CART + POLE
    push = (force + POLE * variant.length * turning.square() * sin) / whole
    turn = (variant.gravity * sin - cos * push) / (variant.length * (4 / 3 - POLE * cos.square() / whole))
    pull = push - POLE * variant.length * turn * cos / whole
    return torch.stack(
        [x + SECONDS * speed, speed + SECONDS * pull, angle + SECONDS * turning, turning + SECONDS * turn], 1
    )
