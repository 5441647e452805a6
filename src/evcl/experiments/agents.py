"""Runs on streams of environments: how `evcl run` trains agents, and what their result is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from msgspec.structs import asdict
from numpy.typing import NDArray
from torch import Tensor

from evcl import metrics, rl
from evcl._core.errors import Diverged, EvclError
from evcl.experiments.config import Config
from evcl.experiments.folder import identity, interruptible
from evcl.experiments.result import Environment, Result, summarise
from evcl.experiments.run import Event, OnEvents, cell_result, environment, matrices_of, over_tasks
from evcl.experiments.samples import film_strips
from evcl.rl.acting import films
from evcl.training import Checkpoints
from evcl.training.checkpoint import Writer

EPISODE_PICTURES = 8


def execute(
    cells: Sequence[Config],
    on_event: OnEvents,
    allow_divergence: bool,
    checkpoints: Checkpoints | None,
) -> list[Result]:
    """The results of cells that differ only in their seed, side by side as replicas."""
    lead = replace(cells[0], seeds=tuple(cell.seed for cell in cells))
    _check(lead)
    everyone, now = range(len(cells)), Event(lead.seeds, 0, lead.tasks, 0.0)

    def heard(task: int, done: float, returns: Tensor | None) -> None:
        nonlocal now
        seen = None if returns is None else float(returns[:, : task + 1].mean())
        now = Event(lead.seeds, task, lead.tasks, (task + done) / lead.tasks, seen)
        on_event(everyone, now)

    machine = environment(lead.device)

    def note(text: str) -> None:
        on_event(everyone, replace(now, accuracy=None, note=text))

    with interruptible(checkpoints, [lead]) as own:
        writer = None if own is None else Writer(own, [identity(lead)], asdict(machine), note)
        stream, method = rl.stream(lead.benchmark, lead.tasks), rl.method(lead.method, lead.benchmark)
        try:
            learned = rl.learn(stream, method, lead.settings, lead.seeds, lead.device, heard, writer)
        except Diverged:
            if not allow_divergence:
                raise
            if len(cells) > 1:  # find out which of them diverge
                return [execute([cell], on_event, True, None)[0] for cell in cells]
            return [_made(cells[0], np.full((lead.tasks, lead.tasks), np.nan, np.float32), 0.0, None, machine, None)]
    seconds, size = learned.seconds / len(cells), learned.agent.memory_bytes()
    each = zip(cells, learned.returns.numpy(), _films(learned.agent), strict=True)
    return [_made(cell, matrix, seconds, size, machine, film) for cell, matrix, film in each]


def _check(config: Config) -> None:
    for name, value in (("network", config.network), ("scenario", config.scenario)):
        if value:
            raise EvclError(f"{config.benchmark} has its own {name}: leave out --{name}", setting=name)
    if config.settings.validation:
        raise EvclError(f"{config.benchmark} has no examples to hold out: leave out --validation", setting="validation")
    if config.log is not None:
        raise EvclError("--log writes epochs, and agents have none: leave it out")
    if config.precision not in ("fp32", "tf32"):
        raise EvclError(f"agents learn in fp32: leave out --precision {config.precision}", setting="precision")


def _films(agent: rl.Agent) -> list[str]:
    """For each replica, an episode of every task that this agent has learned."""
    tasks, replicas = len(agent.stream), range(len(agent.seeds))
    learned = [tasks - 1] if agent.method.needs_task else range(tasks)
    episodes = [films(agent, task, EPISODE_PICTURES, replicas) for task in learned]
    return [film_strips([of_task[r] for of_task in episodes]) for r in replicas]


def _made(
    cell: Config, matrix: NDArray[np.float32], seconds: float, size: int | None, machine: Environment, film: str | None
) -> Result:
    """The result of a cell, from its matrix of returns."""
    hidden = list(getattr(rl.stream(cell.benchmark, cell.tasks).network(), "hidden", ()))
    returns = {"average_return": summarise([metrics.average_accuracy(matrix)]), "returns": matrices_of(matrix)}
    return cell_result(cell, machine, seconds, size, {"hidden": hidden}, samples=film, **over_tasks(matrix), **returns)
