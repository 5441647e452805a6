"""Streams of environments: one after another, a task each, with the same observations and actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from evcl._core.catalogue import BENCHMARK_SUMMARIES
from evcl._core.errors import EvclError, extra, unknown
from evcl.nn import mlp
from evcl.rl import rooms
from evcl.rl.cartpole import Variant
from evcl.rl.environments import Gymnasium, Make


@dataclass(frozen=True)
class Task:
    """A named kind of environment; `make` makes several of it.

    If there is a `context`, the networks see these numbers after those of the observation.
    """

    name: str
    make: Make
    context: tuple[float, ...] = ()


@dataclass(frozen=True)
class Stream:
    """Tasks that are learned one after another.

    An agent must be told the task. Either every task has a context, and all tasks share the network, with one head; or
    none has, and each task has a head of its own.

    Attributes:
        name: its name
        tasks: the tasks
        inputs: the shape of an observation
        actions: the number of actions or, if `continuous`, of the numbers that an action consists of
        network: makes the trunk of the policy and that of the values: observations [B, ...], each followed by its
            context, -> [B, features]
        continuous: whether an action consists of numbers
    """

    name: str
    tasks: Sequence[Task]
    inputs: tuple[int, ...]
    actions: int
    network: Callable[[], nn.Module]
    continuous: bool = False

    def __post_init__(self) -> None:
        widths = {len(task.context) for task in self.tasks}
        if len(widths) != 1:
            raise EvclError("the tasks of a stream must have contexts of one length, or none of them a context")
        if widths != {0} and len(self.inputs) != 1:
            raise EvclError(f"a context follows a vector of numbers, not observations of shape {self.inputs}")

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def seen(self) -> tuple[int, ...]:
        """The shape of what a network sees."""
        width = len(self.tasks[0].context)
        return (self.inputs[0] + width,) if width else self.inputs


CARTPOLES = {
    "standard": Variant(),
    "swapped": Variant(force=-10.0),
    "long pole": Variant(length=2.0, force=15.0),
    "heavy": Variant(gravity=25.0, force=-20.0),
    "short pole": Variant(length=0.2, gravity=4.0, force=5.0),
}


def cartpole_variants() -> Stream:
    """CartPole with another gravity, pole or force in each task; in two of them left and right are swapped."""
    contexts = one_hot(len(CARTPOLES))
    made = [
        Task(name, variant.make, context) for (name, variant), context in zip(CARTPOLES.items(), contexts, strict=True)
    ]
    return Stream("cartpole-variants", made, (4,), 2, partial(mlp, 4 + len(made), [64, 64]))


def minigrid_rooms() -> Stream:
    """A room of MiniGrid in which each task wants another thing."""
    contexts = one_hot(len(rooms.THINGS))
    made = [
        Task(wanted, partial(Gymnasium, partial(rooms.room, wanted)), context)
        for wanted, context in zip(rooms.THINGS, contexts, strict=True)
    ]
    network = partial(mlp, rooms.OBSERVATION_INPUTS + len(made), [64, 64])
    return Stream("minigrid-rooms", made, (rooms.OBSERVATION_INPUTS,), rooms.ACTIONS, network)


def one_hot(tasks: int) -> list[tuple[float, ...]]:
    """A context for each of these tasks: 1 at its own place, and 0 elsewhere."""
    return [tuple(float(i == k) for i in range(tasks)) for k in range(tasks)]


STREAMS: dict[str, Callable[[], Stream]] = {
    "cartpole-variants": cartpole_variants,
    "minigrid-rooms": minigrid_rooms,
}
"""The streams by name; a call makes one."""
SUMMARIES = {name: BENCHMARK_SUMMARIES[name] for name in STREAMS}


def stream(name: str, tasks: int | None = None) -> Stream:
    """The stream of this name, or its first tasks."""
    if name not in STREAMS:
        raise unknown("stream", name, STREAMS)
    whole = STREAMS[name]()
    count = len(whole) if tasks is None else tasks
    if not 1 <= count <= len(whole):
        raise EvclError(f"{name} has {len(whole)} tasks: tasks must be from 1 to {len(whole)}, not {tasks}")
    return replace(whole, tasks=whole.tasks[:count])


def from_gymnasium(
    name: str, tasks: dict[str, Callable[[], object]], network: Callable[[], nn.Module] | None = None
) -> Stream:
    """A stream of your own environments: name of the task -> a function that makes a gymnasium environment.

    All must have observations of one shape, and the same actions: some discrete ones, or numbers (a Box). An
    environment must end its episodes itself: `gymnasium.make` gives it a time limit. `network` makes the trunk; by
    default, it is an MLP with two hidden layers of 64 units.
    """
    with extra("rl", "streams of gymnasium's environments need gymnasium"):
        from gymnasium import spaces

    if not tasks:
        raise EvclError("a stream needs at least one task")
    known = []
    for one in (make() for make in tasks.values()):
        seen, acts = getattr(one, "observation_space", None), getattr(one, "action_space", None)
        if not isinstance(seen, spaces.Box) or not isinstance(acts, (spaces.Box, spaces.Discrete)):
            raise EvclError(f"observations must be a Box, and actions a Box or Discrete, not {seen} and {acts}")
        continuous = isinstance(acts, spaces.Box)
        if isinstance(acts, spaces.Discrete) and acts.start != 0:
            raise EvclError(f"discrete actions must be numbered from 0, not from {acts.start}")
        if isinstance(acts, spaces.Box) and len(acts.shape) != 1:
            raise EvclError(f"an action must be a vector of numbers, not of shape {acts.shape}")
        size = acts.shape[0] if isinstance(acts, spaces.Box) else int(acts.n)
        known.append((tuple(seen.shape), size, continuous))
    if len(set(known)) != 1:
        raise EvclError(f"the tasks of a stream must have the same observations and actions, not {known}")
    inputs, size, continuous = known[0]
    width = int(torch.Size(inputs).numel())
    made = [Task(task, partial(Gymnasium, make)) for task, make in tasks.items()]
    return Stream(name, made, inputs, size, network or partial(mlp, width, [64, 64]), continuous)
