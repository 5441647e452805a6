"""Learn a stream of environments, measure every task after each, and save the state in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from evcl.methods import Method
from evcl.rl import acting
from evcl.rl.agent import Agent
from evcl.rl.dqn import DQN
from evcl.rl.ppo import PPO
from evcl.rl.streams import Stream
from evcl.rl.training import Training
from evcl.training.checkpoint import Saved, Writer

ALGORITHMS: dict[str, Callable[[Agent, int], Training]] = {"ppo": PPO, "dqn": DQN}


class StreamOutcome(NamedTuple):
    """What learning a stream gave.

    Attributes:
        agent: the agents; of a method with an agent per task, the last one
        returns: [R, after task t, on task k]: mean returns; NaN if not measured, as where there is no head for task k
        curves: for each task that was learned, [R, iterations]: the mean return of the episodes that ended in it; NaN
            if none did
        seconds: the time that it took, before it was resumed too
    """

    agent: Agent
    returns: Tensor
    curves: list[Tensor]
    seconds: float


class _Work:
    """A stream that is being learned: what its checkpoints save (see `Resumable`)."""

    def __init__(self, agent: Agent, first: int) -> None:
        self.agent, self.first, self.task, self.iteration = agent, first, first, 0
        count = len(agent.stream)
        self.returns = torch.full((len(agent.seeds), count, count), torch.nan)
        self.curves: list[Tensor] = []
        self.learning: Training | None = None  # the task in training

    def begin(self) -> Training:
        """The task in training; a method that `needs_task` begins every task with a new agent."""
        if self.learning is None:
            agent = self.agent
            if agent.method.needs_task and self.task > self.first:
                self.agent = Agent(agent.stream, agent.method, agent.s, agent.seeds, agent.device)
            self.learning = ALGORITHMS[agent.s.algorithm](self.agent, self.task)
        return self.learning

    def end(self) -> None:
        self.task, self.iteration, self.learning = self.task + 1, 0, None

    def position(self) -> dict[str, object]:
        return {"task": self.task, "iteration": self.iteration, "agent": self.agent.outline()}

    def tensors(self) -> dict[str, Tensor]:
        state = {f"agent {name}": tensor for name, tensor in self.agent.tensors().items()}
        state |= {"returns": self.returns, **{f"curve of {k}": curve for k, curve in enumerate(self.curves)}}
        return state if self.learning is None else state | self.learning.tensors()

    def load(self, saved: Saved) -> None:
        description, tensors = saved.description, saved.tensors
        self.task, self.iteration = int(description["task"]), int(description["iteration"])
        self.agent.load(description["agent"], saved.named("agent "))
        self.returns.copy_(tensors["returns"])
        self.curves = [tensors[f"curve of {k}"] for k in range(self.task - self.first)]
        if self.iteration:
            self.learning = ALGORITHMS[self.agent.s.algorithm](self.agent, self.task)
            self.learning.load(tensors)


def learn(
    stream: Stream,
    method: str | Method,
    settings: Mapping[str, object],
    seeds: Sequence[int] = (0,),
    device: str = "cpu",
    on_progress: Callable[[int, float, Tensor | None], object] = lambda task, done, returns: None,
    saver: Writer | None = None,
    agent: Agent | None = None,
    first: int = 0,
) -> StreamOutcome:
    """Learn the tasks of a stream one after another, with one agent per seed, side by side.

    `method` is a method of the library or of your own, or its name: one whose terms are on the weights alone; or
    "clear" or "separate". `settings` that are not given have their defaults. `on_progress(task, part of the task that
    is done, returns)` is called after each iteration; after each task, with the returns [R, tasks] that were measured.
    A method that `needs_task` begins every task with a new agent. To go on with an `agent` that has learned tasks
    already, pass it, and the `first` task to learn; its returns are measured before that, too.
    """
    begun = time.monotonic()
    work = _Work(agent or Agent(stream, method, settings, seeds, device), first)
    if (saver is None or not saver.resume(work)) and first > 0 and not work.agent.method.needs_task:
        _measure(work, first - 1)  # what the agent can do already
    for task in range(work.task, len(stream)):
        learning = work.begin()
        for i in range(work.iteration, learning.iterations):
            learning.iterate(i)
            on_progress(task, (i + 1) / learning.iterations, None)
            work.iteration = i + 1
            if saver is not None and work.iteration < learning.iterations and saver.due():
                saver.save(work)
        learning.finish()
        work.curves.append(learning.tally.curve)
        _measure(work, task)
        on_progress(task, 1.0, work.returns[:, task])
        work.end()
        if saver is not None and work.task < len(stream):
            saver.save(work)
    seconds = time.monotonic() - begun if saver is None else saver.seconds
    return StreamOutcome(work.agent, work.returns, work.curves, seconds)


def _measure(work: _Work, task: int) -> None:
    """Measure the returns [R, after task, on task k] after this task. An agent per task keeps those of the others."""
    agent, returns = work.agent, work.returns
    tasks = [k for k in range(len(agent.stream)) if agent.has_head(k)]
    if agent.method.needs_task:
        tasks = [task]
        returns[:, task] = returns[:, task - 1]
    for k in tasks:
        returns[:, task, k] = acting.returns(agent, k, agent.s.episodes)
