"""CartPole with another gravity, pole or force: gymnasium's, with these numbers changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from evcl._core.errors import extra
from evcl.rl.environments import Environments, Gymnasium, Picture


class Variant(NamedTuple):
    """A CartPole: `length` is half of the pole's, and a negative `force` swaps left and right."""

    gravity: float = 9.8
    length: float = 0.5
    force: float = 10.0

    def make(self, seeds: Sequence[int], envs: int, purpose: str, device: torch.device) -> Environments:
        """The environments of this variant: a `Make`."""
        return Gymnasium(self.one, seeds, envs, purpose, device, picture)

    def one(self) -> Any:
        """One of them, with gymnasium's interface."""
        with extra("rl", "CartPole needs gymnasium"):
            import gymnasium

        made = gymnasium.make("CartPole-v1", disable_env_checker=True)
        pole: Any = made.unwrapped
        pole.gravity, pole.length, pole.force_mag = self
        pole.polemass_length = pole.masspole * pole.length
        return made


def picture(env: Any) -> Picture:
    """A picture [60, 150, 3] of a CartPole. Gymnasium's own needs pygame, and takes seconds to begin."""
    pole = env.unwrapped
    x, _, angle, _ = pole.state
    down, right = np.mgrid[0:60, 0:150]
    metre = 2 * pole.x_threshold / 130
    px, py = (right - 75) * metre, (48 - down) * metre  # from the middle of the track
    image = np.full((60, 150, 3), 255, np.uint8)
    image[np.abs(py) < 0.02] = 170
    along = (px - x) * math.sin(angle) + py * math.cos(angle)
    across = np.abs((px - x) * math.cos(angle) - py * math.sin(angle))
    image[(np.abs(px - x) < 0.25) & (np.abs(py) < 0.1)] = (40, 40, 40)
    image[(across < 0.05) & (along > 0) & (along < 2 * pole.length)] = (200, 120, 60)
    return image
