"""Advantages and targets of values, from a rollout. All tensors are [T, B]: T steps of B environments.

`values` are V(s_t), and `following` V of the state after each step, before a new episode begins. The value after a
terminated episode counts as 0; after one that was cut off (truncated) it counts, but what follows belongs to another
episode.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Path(NamedTuple):
    """What happened at each step, [T, B] each: see `Outcome`."""

    rewards: Tensor
    terminated: Tensor
    ended: Tensor


def gae(path: Path, values: Tensor, following: Tensor, discount: float, decay: float) -> Tensor:
    """Generalised advantage estimates (Schulman et al., 2016):

    A_t = delta_t + gamma lambda A_{t+1},   delta_t = r_t + gamma V(s_{t+1}) - V(s_t)
    """
    delta = path.rewards + discount * (1 - path.terminated) * following - values
    goes_on = discount * decay * (1 - path.ended)
    advantages, later = torch.empty_like(delta), torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        later = delta[t] + goes_on[t] * later
        advantages[t] = later
    return advantages


def vtrace(
    path: Path, values: Tensor, following: Tensor, ratios: Tensor, discount: float, most: float = 1.0
) -> tuple[Tensor, Tensor]:
    """V-trace (Espeholt et al., 2018): targets of the values, and advantages, of actions by an older policy.

    With the ratios pi(a_t|s_t) / mu(a_t|s_t) cut off at `most` (rho and c),

        v_t = V(s_t) + delta_t + gamma c_t (v_{t+1} - V(s_{t+1})),   delta_t = rho_t (r_t + gamma V(s_{t+1}) - V(s_t))
        A_t = rho_t (r_t + gamma v_{t+1} - V(s_t))
    """
    cut = ratios.clamp(max=most)
    on = discount * (1 - path.terminated)
    delta = cut * (path.rewards + on * following - values)
    goes_on = discount * cut * (1 - path.ended)
    excess, later = torch.empty_like(delta), torch.zeros_like(delta[0])  # v_t - V(s_t)
    for t in reversed(range(len(delta))):
        later = delta[t] + goes_on[t] * later
        excess[t] = later
    after = torch.cat([excess[1:], torch.zeros_like(excess[:1])]) * (1 - path.ended)
    return values + excess, cut * (path.rewards + on * (following + after) - values)


def normalised(advantages: Tensor, axes: int | tuple[int, ...]) -> Tensor:
    """With mean 0 and standard deviation 1 over these axes."""
    spread = advantages.std(axes, correction=0, keepdim=True)
    scaled: Tensor = (advantages - advantages.mean(axes, keepdim=True)) / (spread + 1e-8)
    return scaled
