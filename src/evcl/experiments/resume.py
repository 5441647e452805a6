"""The checkpoints of a run: which run they belong to, where they are, and whether the run can resume from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evcl._core.errors import EvclError
from evcl._core.interrupts import deferred
from evcl._core.settings import Setting

if TYPE_CHECKING:
    from evcl.experiments.config import Config
    from evcl.training import Checkpoints

FOLDER = "checkpoint"  # beside the result
SECONDS = Setting(60.0, "seconds between two checkpoints; 0: only after each task", high=1e6)
"""How often a run saves a checkpoint."""


def describe(config: Config) -> dict[str, Any]:
    """Everything that determines a result. The preset's name is not part of it; its settings are.

    A switch that is off is left out: a new one does not change the description of earlier results.
    """
    return {
        "benchmark": config.benchmark,
        "method": config.method,
        "seeds": list(config.seeds),
        "tasks": config.tasks,
        "settings": {name: value for name, value in config.settings.items() if value is not False},
        "device": config.device,
        "precision": config.precision,
        **({"network": config.network} if config.network else {}),
        **({"scenario": config.scenario} if config.scenario else {}),
    }


def identity(config: Config) -> dict[str, Any]:
    """The description of the configuration that a checkpoint belongs to."""
    about = describe(config)
    settings: dict[str, Any] = about.pop("settings")
    return {**about, **settings}


def program_name(configs: Sequence[Config]) -> str:
    """The name of a program's checkpoint folder; a program of one seed is named after that seed."""
    if len(configs) == len(configs[0].seeds) == 1:
        return f"seed-{configs[0].seed}"
    words = json.dumps([identity(config) for config in configs])
    return f"program-{hashlib.blake2b(words.encode(), digest_size=8).hexdigest()}"


@contextmanager
def interruptible(checkpoints: Checkpoints | None, configs: Sequence[Config]) -> Iterator[Checkpoints | None]:
    """The checkpoints of the program of these configurations, which it also saves at Ctrl-C and at SIGTERM."""
    if checkpoints is None:
        yield None
        return
    with deferred() as asked:
        yield replace(checkpoints.of(program_name(configs)), stop=checkpoints.stop or asked)


def open_checkpoints(
    folder: Path, config: Config, seconds: float = 60.0, resume: bool = False, overwrite: bool = False
) -> Checkpoints:
    """The checkpoints of a run whose result belongs in `folder`. Their `resume` says whether there is one to resume
    from. Raises if they belong to another run, or if there are any without `resume` or `overwrite`.
    """
    from evcl.training import Checkpoints  # imports torch, which evcl status does not need
    from evcl.training.checkpoint import check_identity, newest, unfinished

    checkpoints = Checkpoints(folder / FOLDER, float(SECONDS.check("checkpoint-seconds", seconds)), resume)
    if overwrite:
        checkpoints.remove()
    found = checkpoints.programs()
    if found and not resume:
        raise EvclError(unfinished(folder))
    parts = [config] if config.device == "cuda" else config.cells
    own = {program_name([part]): identity(part) for part in parts}
    for path in found:
        saved = newest(path)
        if saved is not None:
            check_identity(saved, [own.get(path.name, identity(config))])
    return replace(checkpoints, resume=bool(found))
