"""A small stream that every method can learn in a second: in this process, or in several together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import evcl
from evcl._core.randomness import generator
from evcl._core.ranks import Ranks, joined
from evcl._core.settings import Settings, resolve
from evcl.experiments import load_plugins
from evcl.methods import METHODS, TaskData
from evcl.training import Run

F64 = torch.float64
HEADS = (0, 1, 0)  # of three tasks: the last one comes back to the first one's head
EXAMPLES, BATCH, INPUTS = 41, 8, 6  # the last batch has one example: one of two processes has none of it
GIVEN = {"epochs": 2, "batch_size": BATCH, "lr": 0.01, "coreset_size": 5, "memory": 10, "generator_width": 20}


def tasks(replicas: Sequence[int], like: torch.Tensor) -> list[TaskData]:
    """For these replicas: the second task is another for each, the others are shared."""
    found = []
    for k, head in enumerate(HEADS):
        sources = [generator(r, "task", k) for r in (replicas if k == 1 else [0])]
        x = torch.stack([torch.randn(EXAMPLES, INPUTS, generator=source, dtype=F64) for source in sources]).to(like)
        found.append(TaskData(x, (x[:, :, k] > 0).long(), head, task=k))
    return found


def settings(method: str, **given: Any) -> Settings:
    known = METHODS[method].known_settings
    return resolve(method, known, {name: value for name, value in {**GIVEN, **given}.items() if name in known})


def train(
    method: str,
    seeds: Sequence[int],
    given: Sequence[Settings] | None = None,
    replicas: Sequence[int] | None = None,
    ranks: Ranks | None = None,
    network: Callable[[], torch.nn.Module] = lambda: evcl.nn.mlp(INPUTS, [12, 12]),
    **where: Any,
) -> dict[str, torch.Tensor]:
    """All that there is to save when these replicas have learned the stream, and what they predict: [R, ...] each.

    `given`: the settings of each; `replicas`: whose data they have, by default 0, 1, ... `network` makes their
    trunk, which has 12 outputs. `where`: device and dtype.
    """
    each = [settings(method) for _ in seeds] if given is None else given
    options: dict[str, Any] = {"draw": True, "dtype": F64, "ranks": ranks, **where}
    run = Run(network(), METHODS[method], each, seeds, **options)
    stream = tasks(range(len(seeds)) if replicas is None else replicas, run.network.posterior.mean)
    run.add_heads(12, [2, 2])
    for round_ in [stream] if run.method.jointly else [[task] for task in stream]:
        run.learn(round_)
    said = {f"predicted {task.task}": run.predict(task.x, task.head, task=task.task) for task in stream}
    return {**run.tensors(), **said}


def main(folder: Path, methods: Sequence[str]) -> None:
    """Each of these methods with two seeds, by all processes together; each writes what it has."""
    torch.set_num_threads(1)
    load_plugins()
    with joined() as ranks:
        assert ranks is not None
        for method in methods:
            found = train(method, [0, 1], ranks=ranks)
            save_file(
                {name: t.clone(memory_format=torch.contiguous_format) for name, t in found.items()},
                folder / f"{method} {ranks.rank}",
            )
