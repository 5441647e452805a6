"""Learn a stream of environments, measure every task after each, and save the state in between."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl.methods import Method
from evcl.rl import acting
from evcl.rl.agent import Agent, under
from evcl.rl.dqn import DQN
from evcl.rl.ppo import PPO
from evcl.rl.streams import Stream
from evcl.rl.training import Training
from evcl.training.checkpoint import Checkpoints, clear, files, newest, write
from evcl.training.checkpointer import Identity, Stopped, check_identity, unfinished

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


class Saver:
    """Writes the checkpoints of one program, and reads the one to resume from."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        identity: Identity,
        environment: Mapping[str, Any],
        tell: Callable[[str], object] = lambda note: None,
    ) -> None:
        self.checkpoints, self.tell, self.environment = checkpoints, tell, dict(environment)
        self.identity: Identity = json.loads(json.dumps(identity))
        folder = checkpoints.folder
        if files(folder) and not checkpoints.resume:
            raise EvclError(unfinished(folder))
        self.saved = newest(folder) if checkpoints.resume else None
        self.number, self.before = 0, 0.0
        if self.saved is not None:
            check_identity(self.saved, self.identity)
            self.number = int(self.saved.path.stem)
            self.before = float(self.saved.description.get("seconds", 0.0))
            if self.saved.description.get("environment") != self.environment:
                tell(f"{self.saved.path} was written in another environment: results may differ by rounding")
        self.start = self.last = time.monotonic()
        self.failure = ""

    @property
    def seconds(self) -> float:
        return self.before + time.monotonic() - self.start

    def stopping(self) -> bool:
        return self.checkpoints.stop is not None and self.checkpoints.stop()

    def due(self) -> bool:
        seconds = self.checkpoints.seconds
        return self.stopping() or (seconds > 0 and time.monotonic() - self.last >= seconds)

    def save(self, task: int, iteration: int, outline: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Save the state, and end the run if that was asked for. If a file cannot be written, training goes on."""
        folder = self.checkpoints.folder
        path = folder / f"{self.number + 1:08d}.safetensors"
        about = {"owner": self.identity, "environment": self.environment, "seconds": self.seconds}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write(path, {**about, "task": task, "iteration": iteration, "agent": outline}, tensors)
        except (EvclError, OSError) as error:
            if not self.failure:
                self.tell(f"cannot write the checkpoint {path} ({error}); training continues")
            self.failure = str(error)
        else:
            self.failure, self.number = "", self.number + 1
            clear(folder, files(folder)[:2])
        self.last = time.monotonic()
        if self.stopping():
            raise Stopped


def learn(
    stream: Stream,
    method: str | Method,
    settings: Mapping[str, Any],
    seeds: Sequence[int] = (0,),
    device: str = "cpu",
    on_progress: Callable[[int, float, Tensor | None], object] = lambda task, done, returns: None,
    saver: Saver | None = None,
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
    agent = agent or Agent(stream, method, settings, seeds, device)
    anew = agent.method.needs_task
    count, r = len(stream), len(agent.seeds)
    returns = torch.full((r, count, count), torch.nan)
    curves: list[Tensor] = []
    start, at = first, 0
    saved = None if saver is None else saver.saved
    if saver is not None and saved is not None:
        start, at, curves = _resume(saver, agent, returns, first)
    elif first > 0 and not anew:  # what the agent can do already
        _measure(agent, returns, first - 1)
    for task in range(start, count):
        if anew and not at and task > first:
            agent = Agent(stream, agent.method, agent.s, agent.seeds, device)
        learning = ALGORITHMS[agent.s.algorithm](agent, task)
        if at and saver is not None and saved is not None:
            with _fitting(saver):
                learning.load(saved.tensors)
        for i in range(at, learning.iterations):
            learning.iterate(i)
            on_progress(task, (i + 1) / learning.iterations, None)
            if saver is not None and saver.due() and i + 1 < learning.iterations:
                saver.save(task, i + 1, agent.outline(), {**_state(agent, returns, curves), **learning.tensors()})
        at = 0
        learning.finish()
        curves.append(learning.tally.curve)
        _measure(agent, returns, task)
        on_progress(task, 1.0, returns[:, task])
        if saver is not None and task + 1 < count:
            saver.save(task + 1, 0, agent.outline(), _state(agent, returns, curves))
    seconds = time.monotonic() - begun if saver is None else saver.seconds
    return StreamOutcome(agent, returns, curves, seconds)


def _measure(agent: Agent, returns: Tensor, task: int) -> None:
    """Measure the returns [R, after task, on task k] after this task. An agent per task keeps those of the others."""
    own = [k for k in range(len(agent.stream)) if agent.has_head(k)]
    if agent.method.needs_task:
        own = [task]
        returns[:, task] = returns[:, task - 1]
    for k in own:
        returns[:, task, k] = acting.returns(agent, k, agent.s.episodes)


def _state(agent: Agent, returns: Tensor, curves: Sequence[Tensor]) -> dict[str, Tensor]:
    found = {f"agent {name}": tensor for name, tensor in agent.tensors().items()}
    return {**found, "returns": returns, **{f"curve of {k}": curve for k, curve in enumerate(curves)}}


def _resume(saver: Saver, agent: Agent, returns: Tensor, first: int) -> tuple[int, int, list[Tensor]]:
    """The task and the iteration to resume, and the curves of the tasks from `first` to the one before."""
    assert saver.saved is not None
    about, tensors = saver.saved.description, saver.saved.tensors
    with _fitting(saver):
        task, iteration = int(about["task"]), int(about["iteration"])
        agent.load(about["agent"], under("agent ", tensors))
        returns.copy_(tensors["returns"])
        return task, iteration, [tensors[f"curve of {k}"] for k in range(task - first)]


class _fitting:  # noqa: N801  (a context manager)
    """Errors inside are those of a checkpoint that does not fit the run."""

    def __init__(self, saver: Saver) -> None:
        self.saver = saver

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (KeyError, RuntimeError, TypeError, ValueError)) and not isinstance(error, EvclError):
            assert self.saver.saved is not None
            raise EvclError(
                f"the checkpoint {self.saver.saved.path} does not fit the run ({error}): "
                "remove it, or start again with --overwrite"
            ) from error
