"""Acting: rollouts of the policies in training, and the returns of finished ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evcl._core.randomness import Purpose, generator
from evcl.rl.advantages import Path
from evcl.rl.agent import Agent
from evcl.rl.environments import Environments


class Rollout(NamedTuple):
    """T steps of B environments: [T, B, ...] each."""

    observations: Tensor
    actions: Tensor
    outputs: Tensor  # of the policy that acted
    path: Path
    last: Tensor  # observations after each step, before a new episode begins

    def by_replica(self, tensor: Tensor, replicas: int) -> Tensor:
        """[T, R * E, ...] -> [R, T * E, ...]"""
        found: Tensor = tensor.unflatten(1, (replicas, -1)).transpose(0, 1).flatten(1, 2)
        return found


class Tally:
    """The returns of the episodes in progress, and the mean of those that ended, in each iteration."""

    def __init__(self, rows: int, replicas: int, iterations: int, device: torch.device) -> None:
        self.running = torch.zeros(rows, device=device)
        self.curve = torch.full((replicas, iterations), torch.nan)
        self.ended = torch.zeros(replicas, 2)  # sum and number, in this iteration

    def add(self, rewards: Tensor, ended: Tensor) -> None:
        self.running += rewards
        both = torch.stack([self.running * ended, ended], 1).cpu().unflatten(0, (len(self.curve), -1))
        self.ended += both.sum(1)
        self.running *= 1 - ended

    def close(self, iteration: int) -> None:
        self.curve[:, iteration] = self.ended[:, 0] / self.ended[:, 1]  # NaN if no episode ended
        self.ended.zero_()


@torch.no_grad()
def returns(agent: Agent, task: int, episodes: int) -> Tensor:
    """[R]: the mean return of the policies, at the posterior's means, over this many episodes of a task.

    The policy acts as it is: PPO's draws its actions. The episodes and draws are the same at every call.
    """
    weights = agent.network.posterior.mean
    return run(agent, task, weights, agent.stream.tasks[task].make(agent.seeds, episodes, "measured", agent.device))


@torch.no_grad()
def run(agent: Agent, task: int, weights: Tensor, envs: Environments) -> Tensor:
    """[R]: the mean return of one episode of each environment, acting with `weights` [R, P]."""
    rows = len(envs.observations)
    total, going = torch.zeros(rows, device=agent.device), torch.ones(rows, device=agent.device)
    sources = [generator(seed, Purpose.MEASURED_ACTIONS, task) for seed in agent.seeds]
    while bool(going.any()):
        shape = (rows // len(agent.seeds),)
        noise = torch.cat([agent.policy.noise(shape, agent.stream.actions, source) for source in sources])
        outputs = agent.outputs(weights, agent.network.layout, envs.observations, [task])[:, 0]
        outcome = envs.step(agent.policy.act(outputs, noise.to(agent.device)))
        total += going * outcome.rewards
        going *= 1 - outcome.ended
    return total.view(len(agent.seeds), -1).mean(1).cpu()


def frames(agent: Agent, task: int, count: int = 8, replica: int = 0) -> list[Any]:
    """Up to this many pictures of one episode, from its first state to its last, equally far apart."""
    return films(agent, task, count, [replica])[0]


@torch.no_grad()
def films(agent: Agent, task: int, count: int, replicas: Sequence[int]) -> list[list[Any]]:
    """The `frames` of each of these replicas, whose episodes run side by side."""
    seeds, weights = [agent.seeds[r] for r in replicas], agent.network.posterior.mean[list(replicas)]
    envs = agent.stream.tasks[task].make(seeds, 1, "film", agent.device)
    sources = [generator(seed, Purpose.FILM, task) for seed in seeds]
    found = [_Film(4 * count) for _ in seeds]
    going = torch.ones(len(seeds))
    while bool(going.any()):
        for row in going.nonzero().flatten().tolist():
            found[row].add(envs.frame(row))
        noise = torch.cat([agent.policy.noise((1,), agent.stream.actions, source) for source in sources])
        outputs = agent.outputs(weights, agent.network.layout, envs.observations, [task])[:, 0]
        going *= 1 - envs.step(agent.policy.act(outputs, noise.to(agent.device))).ended.cpu()
    films = [film.frames() for film in found]
    return [[film[i] for i in _apart(len(film), count)] for film in films]


class _Film:
    """Pictures of an episode of unknown length: every k-th one, of which there are never more than `most`, and the
    last.
    """

    def __init__(self, most: int) -> None:
        self.most, self.every, self.seen = most, 1, 0
        self.kept: list[Any] = []
        self.last: Any = None

    def add(self, picture: Any) -> None:
        self.last = picture
        if self.seen % self.every == 0:
            if len(self.kept) == self.most:
                self.kept, self.every = self.kept[::2], 2 * self.every
            if self.seen % self.every == 0:
                self.kept.append(picture)
        self.seen += 1

    def frames(self) -> list[Any]:
        return self.kept if (self.seen - 1) % self.every == 0 else [*self.kept, self.last]


def _apart(length: int, count: int) -> list[int]:
    """Up to `count` places of `length`, from the first to the last, equally far apart."""
    places: list[int] = torch.linspace(0, length - 1, min(count, length)).round().long().tolist()
    return places
