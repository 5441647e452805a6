"""Proximal policy optimisation (Schulman et al., 2017) with a Bayesian policy, one task at a time.

L = -E min(r A, clip(r, 1 - eps, 1 + eps) A) - c H(pi) + beta/N KL(q || q_{t-1}) + elastic + distillation

r = pi(a|s) / mu(a|s), and N is the number of environment steps of the task. In each update, every state has its own
draw of the weights; in each rollout, every environment acts with one draw. Distillation keeps the policies of earlier
tasks, through their heads, as they were on the new task's states. The value function is plain, and each task has its
own.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl._core.randomness import Noise, Purpose
from evcl.nn import BayesianNetwork
from evcl.rl.acting import Rollout, Tally
from evcl.rl.advantages import Path, gae
from evcl.rl.agent import Agent
from evcl.rl.clear import Replay
from evcl.rl.policies import Stochastic

LONGEST = 0.5  # the norm that a gradient is clipped to: one rollout with a rare return must not undo the policy


class PPO:
    """One task in training. `iterate(i)` makes rollout i and learns from it."""

    def __init__(self, agent: Agent, task: int) -> None:
        self.agent, self.task, self.s, self.policy = agent, task, agent.s, cast(Stochastic, agent.policy)
        s, size = agent.s, agent.s.envs * agent.s.rollout
        self.iterations = max(1, s.steps // size)
        self.batch = min(s.batch_size, size)
        self.updates = s.passes * -(-size // self.batch)  # per iteration
        self.taken, steps = 0, self.iterations * self.updates
        self.actor = agent.actor(task, steps, self.iterations * size)
        self.critic = agent.critic(steps)
        self.envs = agent.stream.tasks[task].make(agent.seeds, s.envs, f"task {task}", agent.device)
        rows = len(agent.seeds) * s.envs
        self.tally = Tally(rows, len(agent.seeds), self.iterations, agent.device)
        self.states = torch.zeros(len(agent.seeds), s.fisher_examples, *agent.stream.inputs, device=agent.device)
        self.tasks = list(range(task + 1)) if s.distill > 0 else [task]  # whose outputs a loss needs
        self.replay = Replay(agent, task) if "clone" in s else None

    def iterate(self, i: int) -> None:
        s, agent = self.s, self.agent
        rate = 1 - i / self.iterations  # linear, to 0
        for one in (self.actor, self.critic):
            one.update.scale(rate)
        rollout = self.rollout(i)
        r = len(agent.seeds)
        x = rollout.by_replica(rollout.observations, r)
        here = torch.full(x.shape[:2], self.task, device=agent.device)
        viewed, critic = agent.seen(x, here), self.critic.q.mean
        values = agent.value(critic, viewed)
        following = agent.value(critic, agent.seen(rollout.by_replica(rollout.last, r), here))
        flat = rollout.by_replica
        back = (s.rollout, r * s.envs)

        def steps(t: Tensor) -> Tensor:
            """[R, T * E] -> [T, R * E]"""
            return t.view(r, s.rollout, s.envs).transpose(0, 1).reshape(back)

        advantages = flat(gae(rollout.path, steps(values), steps(following), s.discount, s.gae_decay), r)
        targets = values + advantages
        advantages = (advantages - advantages.mean(1, keepdim=True)) / (
            advantages.std(1, correction=0, keepdim=True) + 1e-8
        )
        actions, acted = flat(rollout.actions, r), flat(rollout.outputs, r)
        old = self.policy.log_prob(acted, actions)
        taught = self.teacher(x)
        if self.replay is not None:
            self.replay.begin(self.actor, self.critic)
        for p in range(s.passes):
            order = agent.drawn(lambda g: torch.randperm(x.shape[1], generator=g), Purpose.ORDER, self.task, i, p)
            for b, rows in enumerate(order.split(self.batch, 1)):
                at = torch.arange(r, device=agent.device).unsqueeze(1), rows
                noise = agent.noise(Purpose.NOISE, self.task, i, p, b)
                said = None if taught is None else taught[at]
                self._improve(x[at], actions[at], old[at], advantages[at], said, noise, (i, p, b))
                self.critic.step(noise, partial(self._value_loss, x=viewed[at], targets=targets[at]), LONGEST)
                self.taken += 1
        if self.replay is not None:
            self.replay.add(rollout, i)
        self._remember(x, i)
        self.tally.close(i)

    def _improve(
        self,
        x: Tensor,
        actions: Tensor,
        old: Tensor,
        advantages: Tensor,
        said: Tensor | None,
        noise: Noise,
        where: tuple[int, ...],
    ) -> None:
        agent, s, policy, replay = self.agent, self.s, self.policy, self.replay
        replayed = None if replay is None else replay.sample(where)

        def loss(network: BayesianNetwork) -> Tensor:
            outputs = agent.forward(x.flatten(0, 1), self.tasks).view(*x.shape[:2], len(self.tasks), -1)
            own = outputs[:, :, -1]
            ratio = (policy.log_prob(own, actions) - old).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(1 - s.clip, 1 + s.clip) * advantages)
            found: Tensor = -(gain + s.entropy * policy.entropy(own)).mean(1)
            if said is not None:
                found = found + s.distill * policy.divergence(said, outputs[:, :, :-1]).sum(2).mean(1)
            if replay is not None and replayed is not None:
                found = found + replay.loss(replayed)
            return found

        self.actor.step(noise, loss, LONGEST)

    def _value_loss(self, network: BayesianNetwork, x: Tensor, targets: Tensor) -> Tensor:
        found = network.logits(x.flatten(0, 1), [0]).view(targets.shape)
        return F.mse_loss(found, targets, reduction="none").mean(1)

    @torch.no_grad()
    def rollout(self, i: int) -> Rollout:
        """`rollout` steps of every environment, each with one draw of the weights."""
        agent, s, envs, q = self.agent, self.s, self.envs, self.actor.q
        shape, actions = (s.rollout, s.envs), agent.stream.actions
        noise = agent.drawn(lambda g: agent.policy.noise(shape, actions, g), Purpose.ACTIONS, self.task, i)
        noise = noise.transpose(0, 1).flatten(1, 2)  # [T, R * E, D]
        weights = q.mean
        if q.log_std is not None:
            spread = agent.drawn(
                lambda g: torch.randn(s.envs, q.mean.shape[1], generator=g), Purpose.DRAW, self.task, i
            )
            weights = (q.mean.unsqueeze(1) + q.log_std.exp().unsqueeze(1) * spread).flatten(0, 1)
        kept: list[list[Tensor]] = [[] for _ in range(7)]
        agent.bind(weights, self.actor.layout)
        for t in range(s.rollout):
            seen = envs.observations
            outputs = agent.forward(seen, [self.task])[:, 0]
            chosen = agent.policy.act(outputs, noise[t])
            outcome = envs.step(chosen)
            ended = outcome.ended
            self.tally.add(outcome.rewards, ended)
            now = (seen, chosen, outputs, outcome.rewards, outcome.terminated, ended, outcome.last)
            for to, one in zip(kept, now, strict=True):
                to.append(one)
        seen, chosen, outputs, rewards, terminated, ended, last = map(torch.stack, kept)
        return Rollout(seen, chosen, outputs, Path(rewards, terminated, ended), last)

    def teacher(self, x: Tensor) -> Tensor | None:
        """[R, n, earlier tasks, o]: what the last posterior's means say on these states through the earlier heads."""
        agent, old = self.agent, list(range(self.task))
        if not old or not self.s.distill > 0:
            return None
        found = agent.outputs(agent.prior.mean, agent.network.layout, x.flatten(0, 1), old)
        return found.view(*x.shape[:2], len(old), -1)

    def _remember(self, x: Tensor, i: int) -> None:
        """Keep the last `fisher_examples` states."""
        n = self.states.shape[1]
        some = x[:, -n:]
        places = (torch.arange(some.shape[1], device=x.device) + i * some.shape[1]) % n
        self.states[:, places] = some

    def visited(self) -> Tensor:
        """[R, n, ...]: states that the last policies visited."""
        size = min(self.s.envs * self.s.rollout, self.states.shape[1])
        return self.states[:, : min(self.states.shape[1], self.iterations * size)]

    def finish(self) -> None:
        critic = self.critic.q.mean.clone() if self.replay is not None else None
        self.agent.finish(self.task, self.actor, self.visited(), critic)
        if self.replay is not None:
            self.replay.end()

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Everything that an iteration changes."""
        found = {f"env {name}": t for name, t in self.envs.tensors().items()}
        found |= self.actor.tensors("actor", self.taken) | self.critic.tensors("critic in training", self.taken)
        found |= {"states": self.states, "running": self.tally.running, "curve": self.tally.curve}
        return found if self.replay is None else {**found, **self.replay.tensors()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.envs.load({n.removeprefix("env "): t for n, t in tensors.items() if n.startswith("env ")})
        self.taken = self.actor.load("actor", tensors)
        self.critic.load("critic in training", tensors)
        for name, own in (("states", self.states), ("running", self.tally.running), ("curve", self.tally.curve)):
            own.copy_(tensors[name])
        if self.replay is not None:
            self.replay.load(tensors)
