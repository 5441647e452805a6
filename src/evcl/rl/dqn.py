"""A deep Q network (Mnih et al., 2015) with a Bayesian network, one task at a time.

L = E huber(Q(s, a) - y) + the method's terms + distillation
y = r + gamma Q'(s', argmax_a Q(s', a))                       (double Q-learning, van Hasselt et al., 2016)

Q' is a copy of the posterior's means that is renewed now and then. Exploration is Thompson sampling: an environment
acts greedily with one draw of the weights for a whole episode. Plain weights have no draws; they take random actions,
fewer and fewer. The steps of a task are kept in a buffer, which is emptied when the task ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl._core.randomness import Purpose, generator
from evcl.nn import BayesianNetwork
from evcl.rl.agent import Agent
from evcl.rl.training import Training

BUFFER_STEPS = 20_000  # steps that are kept, per seed
WARM_UP_STEPS = 1000  # steps before the first update, per seed
TARGET_UPDATES = 50  # updates between two copies of the weights to Q'
RANDOM_PART, LAST_SHARE = 0.3, 0.05  # plain weights: random actions get fewer over this part of the task, to this share


class DQN(Training):
    """One task in training. `iterate(i)` takes some steps in every environment, and learns from kept ones."""

    def __init__(self, agent: Agent, task: int) -> None:
        s, r, size, device = agent.s, len(agent.seeds), agent.s.envs * agent.s.rollout, agent.device
        self.updates = max(1, s.passes * size // s.batch_size)  # per iteration
        super().__init__(agent, task, self.updates)
        q, inputs = self.actor.q, agent.stream.inputs
        self.target, self.acting = q.mean.clone(), q.mean.repeat_interleave(s.envs, 0)
        self._draw(range(r * s.envs), 0)
        room = min(BUFFER_STEPS, self.iterations * size) // size * size or size
        self.kept = {
            "x": torch.zeros(r, room, *inputs, device=device),
            "last": torch.zeros(r, room, *inputs, device=device),
            "action": torch.zeros(r, room, dtype=torch.long, device=device),
            "reward": torch.zeros(r, room, device=device),
            "terminated": torch.zeros(r, room, device=device),
        }
        self.live |= {"target": self.target, "acting": self.acting}
        self.live |= {f"buffer {name}": tensor for name, tensor in self.kept.items()}

    def _draw(self, rows: Sequence[int], episode: int) -> None:
        """Give the environments in these rows new draws of the weights, for an episode."""
        q = self.actor.q
        for row in rows:
            r, e = divmod(row, self.s.envs)
            self.acting[row] = q.mean[r]
            if q.log_std is not None:
                source = generator(self.agent.seeds[r], Purpose.THOMPSON, self.task, e, episode)
                spread = torch.randn(q.mean.shape[1], generator=source).to(q.mean)
                self.acting[row] += q.log_std[r].exp() * spread

    def iterate(self, i: int) -> None:
        s, have = self.s, min((i + 1) * self.size, self.kept["x"].shape[1])
        self.start(i)
        self.explore(i)
        if (i + 1) * self.size >= min(WARM_UP_STEPS, s.steps // 2):
            for u in range(self.updates):
                rows = self.agent.drawn(
                    lambda g: torch.randint(have, (s.batch_size,), generator=g), Purpose.REPLAY, self.task, i, u
                )
                self._improve(rows, i, u)
                if self.actor.taken % TARGET_UPDATES == 0:
                    self.target.copy_(self.actor.q.mean)
        self.tally.close(i)

    def _improve(self, rows: Tensor, i: int, u: int) -> None:
        agent, task = self.agent, self.task
        at = torch.arange(len(rows), device=rows.device).unsqueeze(1), rows
        x, last, action, reward, terminated = (tensor[at] for tensor in self.kept.values())
        x, last = x.flatten(0, 1), last.flatten(0, 1)
        best = agent.outputs(self.actor.q.mean, last, [task])[:, 0].argmax(1, keepdim=True)
        value = agent.outputs(self.target, last, [task])[:, 0].gather(1, best).view(reward.shape)
        y = reward + self.s.discount * (1 - terminated) * value
        loss = partial(self._loss, x=x, action=action, y=y, taught=self.taught(x))
        self.actor.step(agent.noise(Purpose.NOISE, task, i, u), loss)

    def _loss(self, network: BayesianNetwork, x: Tensor, action: Tensor, y: Tensor, taught: Tensor | None) -> Tensor:
        outputs = self.agent.forward(x, self.tasks)
        q = outputs[:, -1].gather(1, action.view(-1, 1)).view(y.shape)
        loss = F.smooth_l1_loss(q, y, reduction="none").mean(1)
        if taught is not None:
            apart = self.agent.policy.divergence(taught, outputs[:, :-1]).sum(1)
            loss = loss + self.s.distill * apart.view(y.shape).mean(1)
        return loss

    @torch.no_grad()
    def explore(self, i: int) -> None:
        """Take some steps in every environment, and keep them."""
        s, agent, envs = self.s, self.agent, self.envs
        r, room = len(agent.seeds), self.kept["x"].shape[1]
        share = 0.0 if self.actor.q.log_std is not None else max(LAST_SHARE, 1 - i / (RANDOM_PART * self.iterations))
        shape = (s.rollout, s.envs, 2)
        chance = agent.drawn(lambda g: torch.rand(shape, generator=g), Purpose.RANDOM_ACTIONS, self.task, i)
        chance = chance.transpose(0, 1).flatten(1, 2)  # [T, R * E, 2]
        start = i * self.size % room
        for t in range(s.rollout):
            seen = envs.observations
            best = agent.outputs(self.acting, seen, [self.task])[:, 0].argmax(1)
            chosen = torch.where(chance[t, :, 0] < share, (chance[t, :, 1] * agent.stream.actions).long(), best)
            outcome = envs.step(chosen)
            self.tally.add(outcome.rewards, outcome.ended)
            span = slice(start + t * s.envs, start + (t + 1) * s.envs)
            step = (seen, outcome.last, chosen, outcome.rewards, outcome.terminated)
            for to, one in zip(self.kept.values(), step, strict=True):
                to[:, span] = one.unflatten(0, (r, -1))
            self._draw(outcome.ended.nonzero().flatten().tolist(), i * s.rollout + t + 1)
        done = slice(start, start + self.size)
        self.keep(self.kept["x"][:, done], self.kept["action"][:, done], i)
