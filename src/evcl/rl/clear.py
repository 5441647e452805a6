"""CLEAR (Rolnick et al., 2019): replay of earlier rollouts, with V-trace and cloning of the policy that acted.

A reservoir keeps fragments of rollouts of all tasks, each equally likely. To every batch of new steps as many replayed
ones are added:

    L += -E A log pi(a|s) - c H(pi) + w KL(mu || pi)

with V-trace's advantages A, and the policy mu that acted. A past task's value function is its own and stays as it is:
it needs no cloning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from evcl._core.randomness import Purpose
from evcl.rl.acting import Rollout
from evcl.rl.advantages import Path, normalised, vtrace
from evcl.rl.agent import Agent, under

STEP_FIELDS = ("observations", "actions", "outputs", "rewards", "terminated", "ended", "last")


class Replayed(NamedTuple):
    """Fragments of rollouts: [R, m, T, ...] each."""

    observations: Tensor
    actions: Tensor
    outputs: Tensor
    advantages: Tensor
    tasks: Tensor


class Replay:
    """The reservoir of an agent, while it learns a task. It is kept in `agent.kept`."""

    def __init__(self, agent: Agent, task: int) -> None:
        self.agent, self.task, s = agent, task, agent.s
        self.slots = max(1, s.memory // s.rollout)  # fragments that fit
        self.count = max(1, s.batch_size // s.rollout)  # fragments per step of training
        self.kept = {name: tensor.clone() for name, tensor in agent.kept.items()}  # a task either ends or leaves none
        self.seen = int(self.kept["seen"]) if self.kept else 0

    def add(self, rollout: Rollout, i: int) -> None:
        """Offer each environment's part of a rollout to the reservoir."""
        r = len(self.agent.seeds)
        parts = (*rollout[:3], *rollout.path, rollout.last)
        given = [part.unflatten(1, (r, -1)).movedim(0, 2) for part in parts]  # [R, E, T, ...]
        if not self.kept:
            for name, part in zip(STEP_FIELDS, given, strict=True):
                self.kept[name] = part.new_zeros(r, self.slots, *part.shape[2:])
            self.kept["task"] = torch.zeros(r, self.slots, dtype=torch.long, device=given[0].device)
        draws = self.agent.drawn(lambda g: torch.rand(given[0].shape[1], generator=g), Purpose.RESERVOIR, self.task, i)
        for e in range(given[0].shape[1]):
            for row in range(r):
                place = self.seen if self.seen < self.slots else int(draws[row, e] * (self.seen + 1))
                if place < self.slots:
                    for name, part in zip(STEP_FIELDS, given, strict=True):
                        self.kept[name][row, place] = part[row, e]
                    self.kept["task"][row, place] = self.task
            self.seen += 1
        self.kept["seen"] = torch.tensor(self.seen)

    @torch.no_grad()
    def sample(self, where: tuple[int, ...], actor: Tensor, critic: Tensor) -> Replayed | None:
        """Some fragments, with their advantages under the present weights of the policy and of the values."""
        have = min(self.seen, self.slots)
        if not have:
            return None
        agent = self.agent
        rows = agent.drawn(
            lambda g: torch.randint(have, (self.count,), generator=g), Purpose.REPLAY, self.task, *where
        )  # [R, m]
        r, at = len(rows), (torch.arange(len(rows), device=rows.device).unsqueeze(1), rows)
        seen, actions, outputs, rewards, terminated, ended, last = (self.kept[name][at] for name in STEP_FIELDS)
        tasks = self.kept["task"][at]
        critics = torch.stack([*(agent.critics[k] for k in range(self.task)), critic])  # [K, R, P]
        own = critics[tasks, torch.arange(r, device=rows.device).unsqueeze(1)].flatten(0, 1)  # [R * m, P]
        each = tasks.unsqueeze(2).expand(seen.shape[:3])
        values, following = (agent.value(own, agent.seen(x, each).flatten(0, 1)).T for x in (seen, last))  # [T, R * m]
        agent.bind(actor)
        now = agent.forward_each(seen.flatten(0, 2), each.flatten()).view(outputs.shape)
        ratios = (agent.policy.log_prob(now, actions) - agent.policy.log_prob(outputs, actions)).exp()
        path = Path(*(t.flatten(0, 1).T for t in (rewards, terminated, ended)))
        _, advantages = vtrace(path, values, following, ratios.flatten(0, 1).T, agent.s.discount)
        return Replayed(seen, actions, outputs, normalised(advantages.T.view(rewards.shape), (1, 2)), each)

    def loss(self, some: Replayed) -> Tensor:
        """[R], with the weights that are bound."""
        policy, s = self.agent.policy, self.agent.s
        now = self.agent.forward_each(some.observations.flatten(0, 2), some.tasks.flatten()).view(some.outputs.shape)
        gain = some.advantages * policy.log_prob(now, some.actions) + s.entropy * policy.entropy(now)
        loss: Tensor = (s.clone * policy.divergence(some.outputs, now) - gain).mean((1, 2))
        return loss

    def end(self) -> None:
        self.agent.kept = self.kept

    def tensors(self) -> dict[str, Tensor]:
        return {f"replay {name}": tensor for name, tensor in self.kept.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.kept = {name: t.to(self.agent.device) for name, t in under("replay ", tensors).items()}
        self.seen = int(self.kept["seen"]) if self.kept else 0
