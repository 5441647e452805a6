"""One task in training: what PPO and a deep Q network share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from evcl.rl.acting import Tally
from evcl.rl.agent import Agent, Trainable, under


class Training:
    """One task in training. `iterate(i)` takes some steps in every environment, and learns from them.

    `states` and `actions` hold the last `fisher_examples` steps, on which the method measures the task when it ends.
    `live` are the tensors that an iteration changes in place.
    """

    def __init__(self, agent: Agent, task: int, updates: int) -> None:
        """`updates`: the steps of training per iteration."""
        self.agent, self.task, self.s = agent, task, agent.s
        s, r = agent.s, len(agent.seeds)
        self.size = s.envs * s.rollout  # steps per iteration, of each replica
        self.iterations = max(1, s.steps // self.size)
        count = min(s.fisher_examples, self.iterations * self.size)
        self.states = torch.zeros(r, count, *agent.stream.seen, device=agent.device)
        self.actions = agent.no_actions(count)
        samples, steps = self.iterations * self.size, self.iterations * updates
        self.actor = agent.begin(task, self.states, self.actions, samples, steps)
        self.trained: dict[str, Trainable] = {"actor": self.actor}
        self.envs = agent.stream.tasks[task].make(agent.seeds, s.envs, f"task {task}", agent.device)
        self.tally = Tally(r * s.envs, r, self.iterations, agent.device)
        self.tasks = list(range(task + 1)) if s.distill > 0 else [task]  # whose outputs a loss needs
        self.live = {"states": self.states, "actions": self.actions}
        self.live |= {"running": self.tally.running, "curve": self.tally.curve}

    def iterate(self, i: int) -> None:
        raise NotImplementedError

    def start(self, i: int) -> None:
        """Begin an iteration: learning rates fall linearly to 0."""
        for one in self.trained.values():
            one.update.scale(1 - i / self.iterations)

    def seen(self, x: Tensor) -> Tensor:
        """What the networks see of observations [R, n, ...] of this task."""
        return self.agent.seen(x, torch.full(x.shape[:2], self.task, device=x.device))

    def keep(self, x: Tensor, actions: Tensor, i: int) -> None:
        """Keep the last of an iteration's observations [R, n, ...] and actions."""
        count = self.states.shape[1]
        new = min(count, self.size)
        at = (torch.arange(new, device=x.device) + i * new) % count
        self.states[:, at], self.actions[:, at] = self.seen(x[:, -new:]), actions[:, -new:]

    def taught(self, x: Tensor) -> Tensor | None:
        """[n, earlier tasks, o]: what the posterior's means said of observations x [n, ...] before this task."""
        if len(self.tasks) == 1:
            return None
        return self.agent.outputs(self.agent.network.posterior.mean, x, self.tasks[:-1])

    def finish(self) -> None:
        self.agent.finish(self.task, self.actor)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that an iteration changes."""
        state = {f"env {name}": tensor for name, tensor in self.envs.tensors().items()}
        for name, one in self.trained.items():
            state |= one.tensors(name)
        return state | {f"live {name}": tensor for name, tensor in self.live.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.envs.load(under("env ", tensors))
        for name, one in self.trained.items():
            one.load(name, tensors)
        for name, buffer in self.live.items():
            buffer.copy_(tensors[f"live {name}"])
