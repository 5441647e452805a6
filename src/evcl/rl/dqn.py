"""A deep Q network (Mnih et al., 2015) with a Bayesian network, one task at a time.

L = E huber(Q(s, a) - y) + beta/N KL(q || q_{t-1}) + elastic + distillation
y = r + gamma Q'(s', argmax_a Q(s', a))                       (double Q-learning, van Hasselt et al., 2016)

Q' is a copy of the posterior's means that is renewed now and then. Exploration is Thompson sampling: an environment
acts greedily with one draw of the weights for a whole episode. Plain weights have no draws; they take random actions,
fewer and fewer. The steps of a task are kept in a buffer, which is emptied when the task ends.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl._core.randomness import Purpose, generator
from evcl.nn import BayesianNetwork
from evcl.rl.acting import Tally
from evcl.rl.agent import Agent

BUFFER = 20_000  # steps that are kept, per seed
WARM = 1000  # steps before the first update, per seed
RENEW = 50  # updates between two copies of the weights to Q'
RANDOM, FEWEST = 0.3, 0.05  # plain weights: the part of the task in which random actions get fewer; their last share


class DQN:
    """One task in training. `iterate(i)` takes some steps in every environment, and learns from kept ones."""

    def __init__(self, agent: Agent, task: int) -> None:
        self.agent, self.task, self.s = agent, task, agent.s
        s, size, r = agent.s, agent.s.envs * agent.s.rollout, len(agent.seeds)
        self.iterations = max(1, s.steps // size)
        self.updates = max(1, s.passes * size // s.batch_size)  # per iteration
        self.taken, steps = 0, self.iterations * self.updates
        self.actor = agent.actor(task, steps, self.iterations * size)
        self.envs = agent.stream.tasks[task].make(agent.seeds, s.envs, f"task {task}", agent.device)
        self.tally = Tally(r * s.envs, r, self.iterations, agent.device)
        self.target = self.actor.q.mean.clone()
        self.acting = self._draws(range(r * s.envs), [0] * (r * s.envs), None)
        room = min(BUFFER, self.iterations * size) // size * size or size
        inputs, device = agent.stream.inputs, agent.device
        self.kept = {
            "x": torch.zeros(r, room, *inputs, device=device),
            "last": torch.zeros(r, room, *inputs, device=device),
            "action": torch.zeros(r, room, dtype=torch.long, device=device),
            "reward": torch.zeros(r, room, device=device),
            "terminated": torch.zeros(r, room, device=device),
        }
        self.tasks = list(range(task + 1)) if s.distill > 0 else [task]  # whose outputs a loss needs

    def _draws(self, rows: range | list[int], episodes: list[int], have: Tensor | None) -> Tensor:
        """[R * E, P]: one draw of the weights for each environment; those in `rows` are new, for these episodes."""
        s, q = self.s, self.actor.q
        found = q.mean.repeat_interleave(s.envs, 0) if have is None else have
        for row, episode in zip(rows, episodes, strict=True):
            r, e = divmod(row, s.envs)
            found[row] = q.mean[r]
            if q.log_std is not None:
                source = generator(self.agent.seeds[r], Purpose.THOMPSON, self.task, e, episode)
                spread = torch.randn(q.mean.shape[1], generator=source).to(q.mean)
                found[row] += q.log_std[r].exp() * spread
        return found

    def iterate(self, i: int) -> None:
        s, agent = self.s, self.agent
        self.actor.update.scale(1 - i / self.iterations)
        self.explore(i)
        have = min((i + 1) * s.envs * s.rollout, self.kept["x"].shape[1])
        if (i + 1) * s.envs * s.rollout >= min(WARM, s.steps // 2):
            for u in range(self.updates):
                rows = agent.drawn(
                    lambda g: torch.randint(have, (s.batch_size,), generator=g), Purpose.REPLAY, self.task, i, u
                )
                self._improve(rows, i, u)
                self.taken += 1
                if self.taken % RENEW == 0:
                    self.target.copy_(self.actor.q.mean)
        self.tally.close(i)

    def _improve(self, rows: Tensor, i: int, u: int) -> None:
        s, agent, task = self.s, self.agent, self.task
        at = torch.arange(len(rows), device=rows.device).unsqueeze(1), rows
        x, last, action, reward, terminated = (
            self.kept[name][at] for name in ("x", "last", "action", "reward", "terminated")
        )
        layout, flat = self.actor.layout, last.flatten(0, 1)
        best = agent.outputs(self.actor.q.mean, layout, flat, [task])[:, 0].argmax(1, keepdim=True)
        value = agent.outputs(self.target, layout, flat, [task])[:, 0].gather(1, best).view(reward.shape)
        y = reward + s.discount * (1 - terminated) * value
        said = None
        if s.distill > 0 and task:
            said = agent.outputs(agent.prior.mean, agent.network.layout, x.flatten(0, 1), list(range(task)))

        def loss(network: BayesianNetwork) -> Tensor:
            outputs = agent.forward(x.flatten(0, 1), self.tasks)
            q = outputs[:, -1].gather(1, action.view(-1, 1)).view(y.shape)
            found = F.smooth_l1_loss(q, y, reduction="none").mean(1)
            if said is not None:
                apart = agent.policy.divergence(said, outputs[:, :-1]).sum(1)
                found = found + s.distill * apart.view(y.shape).mean(1)
            return found

        self.actor.step(agent.noise(Purpose.NOISE, self.task, i, u), loss)

    @torch.no_grad()
    def explore(self, i: int) -> None:
        """Take some steps in every environment, and keep them."""
        s, agent, envs = self.s, self.agent, self.envs
        r, room = len(agent.seeds), self.kept["x"].shape[1]
        share = 0.0 if self.actor.q.log_std is not None else max(FEWEST, 1 - i / (RANDOM * self.iterations))
        shape, actions = (s.rollout, s.envs, 2), agent.stream.actions
        chance = agent.drawn(lambda g: torch.rand(shape, generator=g), Purpose.RANDOM_ACTIONS, self.task, i)
        chance = chance.transpose(0, 1).flatten(1, 2)  # [T, R * E, 2]
        start = i * s.rollout * s.envs % room
        for t in range(s.rollout):
            seen = envs.observations
            best = agent.outputs(self.acting, self.actor.layout, seen, [self.task])[:, 0].argmax(1)
            chosen = torch.where(chance[t, :, 0] < share, (chance[t, :, 1] * actions).long(), best)
            outcome = envs.step(chosen)
            self.tally.add(outcome.rewards, outcome.ended)
            span = slice(start + t * s.envs, start + (t + 1) * s.envs)
            for name, one in (
                ("x", seen),
                ("last", outcome.last),
                ("action", chosen),
                ("reward", outcome.rewards),
                ("terminated", outcome.terminated),
            ):
                self.kept[name][:, span] = one.unflatten(0, (r, -1))
            rows = outcome.ended.nonzero().flatten().tolist()
            self.acting = self._draws(rows, [i * s.rollout + t + 1] * len(rows), self.acting)

    def finish(self) -> None:
        self.agent.finish(self.task, self.actor, self.visited())

    def visited(self) -> Tensor:
        """[R, n, ...]: the last states of the task. The buffer is a ring: its oldest rows are overwritten first."""
        kept, taken = self.kept["x"], self.iterations * self.s.envs * self.s.rollout
        n = min(self.s.fisher_examples, kept.shape[1], taken)
        return kept[:, torch.arange(taken - n, taken, device=kept.device) % kept.shape[1]]

    def tensors(self) -> dict[str, Tensor]:
        """Everything that an iteration changes."""
        found = {f"env {name}": t for name, t in self.envs.tensors().items()}
        found |= {f"buffer {name}": t for name, t in self.kept.items()}
        found |= self.actor.tensors("actor", self.taken)
        return {
            **found,
            "target": self.target,
            "acting": self.acting,
            "running": self.tally.running,
            "curve": self.tally.curve,
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.envs.load({n.removeprefix("env "): t for n, t in tensors.items() if n.startswith("env ")})
        self.taken = self.actor.load("actor", tensors)
        for name, own in self.kept.items():
            own.copy_(tensors[f"buffer {name}"])
        for name, own in (
            ("target", self.target),
            ("acting", self.acting),
            ("running", self.tally.running),
            ("curve", self.tally.curve),
        ):
            own.copy_(tensors[name])
