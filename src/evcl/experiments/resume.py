"""The checkpoints of a run: whose they are, where they lie, and whether a run can be resumed from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evcl._core.errors import EvclError
from evcl._core.settings import Setting

if TYPE_CHECKING:
    from evcl.experiments.run import Config
    from evcl.training import Checkpoints

FOLDER = "checkpoint"  # beside the result
SECONDS = Setting(60.0, "between two checkpoints; 0: at the ends of tasks only", high=1e6)


def describe(config: Config) -> dict[str, Any]:
    """Everything that decides a result. The preset does not: its settings are here."""
    return {
        "benchmark": config.benchmark,
        "method": config.method,
        "seeds": list(config.seeds),
        "tasks": config.tasks,
        "settings": dict(config.settings),
        "device": config.device,
        "precision": config.precision,
    }


def owner(config: Config) -> dict[str, Any]:
    """What a checkpoint belongs to."""
    about = describe(config)
    settings: dict[str, Any] = about.pop("settings")
    return {**about, **settings}


def program_name(configs: Sequence[Config]) -> str:
    """The folder of a program's checkpoints; a program of one seed is called after it."""
    if len(configs) == len(configs[0].seeds) == 1:
        return f"seed-{configs[0].seed}"
    words = json.dumps([owner(config) for config in configs])
    return f"program-{hashlib.blake2b(words.encode(), digest_size=8).hexdigest()}"


def open_checkpoints(
    folder: Path, config: Config, seconds: float = 60.0, resume: bool = False, overwrite: bool = False
) -> Checkpoints:
    """The checkpoints of a run whose result lies in `folder`; its `resume` says whether there is something to go on
    from. Those of another run are an error; so are any, if it does not `resume` and does not `overwrite` them.
    """
    from evcl.training import Checkpoints  # and torch, which evcl status does without
    from evcl.training.checkpoint import newest
    from evcl.training.checkpointer import check_owner, unfinished

    checkpoints = Checkpoints(folder / FOLDER, float(SECONDS.check("checkpoint-seconds", seconds)), resume)
    if overwrite:
        checkpoints.remove()
    found = checkpoints.programs()
    if found and not resume:
        raise EvclError(unfinished(folder))
    parts = [config] if config.device == "cuda" else config.cells
    own = {program_name([part]): owner(part) for part in parts}
    for path in found:
        saved = newest(path)
        if saved is not None:
            check_owner(saved, [own.get(path.name, owner(config))])
    return replace(checkpoints, resume=bool(found))
