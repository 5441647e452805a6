"""Proximal policy optimisation (Schulman et al., 2017) with a Bayesian policy, one task at a time.

L = -E min(r A, clip(r, 1 - eps, 1 + eps) A) - c H(pi) + the method's terms + distillation

r = pi(a|s) / mu(a|s). In each update, every state has its own draw of the weights; in each rollout, every environment
acts with one draw. Distillation keeps the policies of earlier tasks, through their heads, as they were on the new
task's states. The value function is plain, and each task has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl._core.randomness import Purpose
from evcl.nn import BayesianNetwork
from evcl.rl.acting import Rollout
from evcl.rl.advantages import Path, gae, normalised
from evcl.rl.agent import Agent
from evcl.rl.clear import Replay, Replayed
from evcl.rl.training import Training

MAX_GRADIENT_NORM = 0.5  # gradients are clipped to this norm: one rollout with a rare return must not undo the policy


class Batch(NamedTuple):
    """Some steps of a rollout: [R, B, ...] each."""

    x: Tensor
    actions: Tensor
    log_prob: Tensor  # of the policy that acted
    advantages: Tensor
    taught: Tensor | None  # [R, B, earlier tasks, o]


class PPO(Training):
    """One task in training. `iterate(i)` makes rollout i and learns from it."""

    def __init__(self, agent: Agent, task: int) -> None:
        s, size = agent.s, agent.s.envs * agent.s.rollout
        self.batch = min(s.batch_size, size)
        updates = s.passes * -(-size // self.batch)
        super().__init__(agent, task, updates)
        self.critic = self.trained["critic in training"] = agent.critic(self.iterations * updates)
        self.replay = Replay(agent, task) if "clone" in s else None

    def iterate(self, i: int) -> None:
        s, agent, r = self.s, self.agent, len(self.agent.seeds)
        self.start(i)
        rollout = self.rollout(i)

        def by_step(t: Tensor) -> Tensor:
            """[R, T * E] -> [T, R * E]"""
            return t.view(r, s.rollout, s.envs).transpose(0, 1).flatten(1, 2)

        x, actions, acted, last = (
            rollout.by_replica(t, r) for t in (rollout.observations, rollout.actions, rollout.outputs, rollout.last)
        )
        seen = self.seen(x)
        values, following = (agent.value(self.critic.q.mean, one) for one in (seen, self.seen(last)))
        estimates = gae(rollout.path, by_step(values), by_step(following), s.discount, s.gae_decay)
        advantages, taught = rollout.by_replica(estimates, r), self.taught(x.flatten(0, 1))
        targets, advantages = values + advantages, normalised(advantages, 1)
        old = agent.policy.log_prob(acted, actions)
        said = None if taught is None else taught.unflatten(0, x.shape[:2])
        for p in range(s.passes):
            order = agent.drawn(lambda g: torch.randperm(self.size, generator=g), Purpose.ORDER, self.task, i, p)
            for b, rows in enumerate(order.split(self.batch, 1)):
                at = torch.arange(r, device=agent.device).unsqueeze(1), rows
                noise = agent.noise(Purpose.NOISE, self.task, i, p, b)
                batch = Batch(x[at], actions[at], old[at], advantages[at], None if said is None else said[at])
                more = None
                if self.replay is not None:
                    more = self.replay.sample((i, p, b), self.actor.q.mean, self.critic.q.mean)
                self.actor.step(noise, partial(self._loss, batch=batch, replayed=more), MAX_GRADIENT_NORM)
                self.critic.step(noise, partial(_value_loss, seen=seen[at], targets=targets[at]), MAX_GRADIENT_NORM)
        if self.replay is not None:
            self.replay.add(rollout, i)
        self.tally.close(i)

    def _loss(self, network: BayesianNetwork, batch: Batch, replayed: Replayed | None) -> Tensor:
        agent, s, policy = self.agent, self.s, self.agent.policy
        outputs = agent.forward(batch.x.flatten(0, 1), self.tasks).unflatten(0, batch.x.shape[:2])
        current = outputs[:, :, -1]
        ratio = (policy.log_prob(current, batch.actions) - batch.log_prob).exp()
        gain = torch.minimum(ratio * batch.advantages, ratio.clamp(1 - s.clip, 1 + s.clip) * batch.advantages)
        loss: Tensor = -(gain + s.entropy * policy.entropy(current)).mean(1)
        if batch.taught is not None:
            loss = loss + s.distill * policy.divergence(batch.taught, outputs[:, :, :-1]).sum(2).mean(1)
        if self.replay is not None and replayed is not None:
            loss = loss + self.replay.loss(replayed)
        return loss

    @torch.no_grad()
    def rollout(self, i: int) -> Rollout:
        """`rollout` steps of every environment, each with one draw of the weights."""
        agent, s, envs, q = self.agent, self.s, self.envs, self.actor.q
        shape, actions = (s.rollout, s.envs), agent.stream.actions
        noise = agent.drawn(lambda g: agent.policy.noise(shape, actions, g), Purpose.ACTIONS, self.task, i)
        noise = noise.transpose(0, 1).flatten(1, 2)  # [T, R * E, D]
        weights = q.mean
        if q.log_std is not None:
            size = (s.envs, q.mean.shape[1])
            spread = agent.drawn(lambda g: torch.randn(size, generator=g), Purpose.DRAW, self.task, i)
            weights = (q.mean.unsqueeze(1) + q.log_std.exp().unsqueeze(1) * spread).flatten(0, 1)
        steps = []
        agent.bind(weights)
        for t in range(s.rollout):
            seen = envs.observations
            outputs = agent.forward(seen, [self.task])[:, 0]
            chosen = agent.policy.act(outputs, noise[t])
            outcome = envs.step(chosen)
            self.tally.add(outcome.rewards, outcome.ended)
            steps.append((seen, chosen, outputs, outcome.rewards, outcome.terminated, outcome.ended, outcome.last))
        seen, chosen, outputs, rewards, terminated, ended, last = map(torch.stack, zip(*steps, strict=True))
        rollout = Rollout(seen, chosen, outputs, Path(rewards, terminated, ended), last)
        r = len(agent.seeds)
        self.keep(rollout.by_replica(seen, r), rollout.by_replica(chosen, r), i)
        return rollout

    def finish(self) -> None:
        super().finish()
        if self.replay is not None:
            self.agent.critics[self.task] = self.critic.q.mean.clone()
            self.replay.end()

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | ({} if self.replay is None else self.replay.tensors())

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        super().load(tensors)
        if self.replay is not None:
            self.replay.load(tensors)


def _value_loss(network: BayesianNetwork, seen: Tensor, targets: Tensor) -> Tensor:
    values = network.logits(seen.flatten(0, 1), [0]).view(targets.shape)
    return F.mse_loss(values, targets, reduction="none").mean(1)
