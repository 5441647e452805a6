"""Acting: rollouts of the policies in training, and the returns of finished ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from evcl._core.randomness import Purpose, generator
from evcl.rl.advantages import Path
from evcl.rl.agent import Agent
from evcl.rl.environments import Environments, Outcome, Picture


class Rollout(NamedTuple):
    """T steps of B environments: [T, B, ...] each."""

    observations: Tensor
    actions: Tensor
    outputs: Tensor  # of the policy that acted
    path: Path
    last: Tensor  # observations after each step, before a new episode begins

    def by_replica(self, tensor: Tensor, replicas: int) -> Tensor:
        """[T, R * E, ...] -> [R, T * E, ...]"""
        folded: Tensor = tensor.unflatten(1, (replicas, -1)).transpose(0, 1).flatten(1, 2)
        return folded


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
    envs = agent.stream.tasks[task].make(agent.seeds, episodes, "measured", agent.device)
    rows = len(envs.observations)
    total, going = torch.zeros(rows, device=agent.device), torch.ones(rows, device=agent.device)
    sources = [generator(seed, Purpose.MEASURED_ACTIONS, task) for seed in agent.seeds]
    while bool(going.any()):
        outcome = _step(agent, task, weights, envs, sources)
        total += going * outcome.rewards
        going *= 1 - outcome.ended
    return total.view(len(agent.seeds), -1).mean(1).cpu()


def frames(agent: Agent, task: int, count: int = 8, replica: int = 0) -> list[Picture]:
    """Up to this many pictures of one episode, from its first state to its last, equally far apart."""
    return films(agent, task, count, [replica])[0]


@torch.no_grad()
def films(agent: Agent, task: int, count: int, replicas: Sequence[int]) -> list[list[Picture]]:
    """The `frames` of each of these replicas, whose episodes run side by side: once to count their states, and then
    again, to draw some of them.
    """
    seeds, weights = [agent.seeds[r] for r in replicas], agent.network.posterior.mean[list(replicas)]

    def episode(draw: Callable[[Environments, int, int], object]) -> list[int]:
        """The number of states of each replica's episode; draw(environments, row, number) is called at each."""
        envs, states = agent.stream.tasks[task].make(seeds, 1, "film", agent.device), [0] * len(seeds)
        sources = [generator(seed, Purpose.FILM, task) for seed in seeds]
        going = torch.ones(len(seeds))
        while bool(going.any()):
            for row in going.nonzero().flatten().tolist():
                draw(envs, row, states[row])
                states[row] += 1
            going *= 1 - _step(agent, task, weights, envs, sources).ended.cpu()
        return states

    wanted = [
        torch.linspace(0, length - 1, min(count, length)).round().long().tolist()
        for length in episode(lambda envs, row, number: None)
    ]
    pictures: list[list[Picture]] = [[] for _ in seeds]
    episode(lambda envs, row, number: pictures[row].append(envs.frame(row)) if number in wanted[row] else None)
    return pictures


def _step(agent: Agent, task: int, weights: Tensor, envs: Environments, sources: Sequence[torch.Generator]) -> Outcome:
    """One step of all environments, equally many of which act with each of the weights [W, P]."""
    shape = (len(envs.observations) // len(sources),)
    noise = torch.cat([agent.policy.noise(shape, agent.stream.actions, source) for source in sources])
    outputs = agent.outputs(weights, envs.observations, [task])[:, 0]
    return envs.step(agent.policy.act(outputs, noise.to(agent.device)))
