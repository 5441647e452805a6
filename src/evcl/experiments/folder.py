"""The folder of a run: which result it holds, the lock for the process that works in it, and writing a result."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from evcl._core.errors import EvclError
from evcl._core.files import (
    NoHardLinks,
    check_regular,
    locked,
    remove_leftovers,
    sync_folder,
    write_atomically,
    write_once,
)
from evcl._core.interrupts import deferred
from evcl._core.settings import Setting
from evcl.experiments.result import RESULT, Result, to_json
from evcl.experiments.trunk import is_text

if TYPE_CHECKING:
    from evcl.experiments.config import Config
    from evcl.training import Checkpoints

LOCK = ".evcl-run.lock"  # in a result's folder while a run works there


def is_of(result: Result, config: Config) -> bool:
    """Whether a result belongs to a configuration. The preset's name may differ: only its settings count."""
    wanted = {**config.settings, "tasks": config.tasks, "precision": config.precision, "device": config.device}
    same = (result.benchmark, result.method, result.seeds) == (config.benchmark, config.method, list(config.seeds))
    network = result.config.get("network")
    same = same and (network == config.network if config.network else not is_text(network))
    same = same and result.config.get("scenario", "") == config.scenario
    return same and result.config | wanted == result.config


def open_folder(folder: Path, config: Config, overwrite: bool = False, name: str = RESULT) -> Result | None:
    """Check that this run's result can be written to the folder. Returns the result if it is already there."""
    result = None
    try:
        if (folder / name).exists():
            from evcl.experiments.reading import read_result

            check_regular(folder / name)
            result = read_result(folder / name)
    except EvclError as error:
        if not overwrite:
            raise EvclError(f"{error}: pass --overwrite or another --out") from None
    except OSError as error:
        raise EvclError(f"cannot write {folder / name}: {error.strerror or error}") from error
    if result is not None and not overwrite:
        if is_of(result, config) and result.preset == config.preset:
            return result
        raise EvclError(f"{folder} holds another run ({result.benchmark} {result.method}): pass --overwrite or --out")
    check_writable(folder)
    return None


def check_writable(folder: Path) -> None:
    """Check, before hours of training, that a result can be written there. Leaves nothing behind."""
    try:
        with _made(folder):
            probe = folder / ".evcl-writable"
            probe.touch()
            probe.unlink()
    except (OSError, ValueError) as error:
        raise EvclError(f"cannot write to {folder}: {getattr(error, 'strerror', None) or error}") from error


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make the folder if it does not exist. On exit, remove it again if it was made here and is empty."""
    made: list[Path] = []
    try:
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:  # a failed run leaves nothing behind; `write_result` makes the folders again
        for path in made:
            with contextlib.suppress(OSError, ValueError):
                path.rmdir()


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Lock a result's folder for one run at a time. A second run raises, so that neither result is overwritten."""
    with contextlib.ExitStack() as stack:
        # If the folder is not writable, `open_folder` raises where it matters. Some file systems have no locks.
        with contextlib.suppress(OSError, NotImplementedError):
            stack.enter_context(_made(folder))
            stack.enter_context(locked(folder / LOCK, f"{folder}: another evcl is at work on it"))
            remove_leftovers(folder / RESULT)
        yield


def write_result(folder: Path, result: Result, overwrite: bool = False) -> Path:
    """Write `result.json` atomically. Without `overwrite`, a result written since `open_folder` looked is not replaced:
    one of the same run is as good and is kept, one of another run is an error.
    """
    path, text = folder / RESULT, to_json(result)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EvclError(f"cannot write {path}: {error.strerror or error}") from error
    if not overwrite and not path.exists():
        with contextlib.suppress(NoHardLinks):
            if write_once(path, text):
                sync_folder(folder)
                return path
    if not overwrite and path.exists():
        from evcl.experiments.reading import read_result

        written = read_result(path)
        if any(getattr(written, key) != getattr(result, key) for key in ("benchmark", "method", "config", "seeds")):
            other = f"{written.benchmark} {written.method}"
            raise EvclError(f"{path} is the result of another run ({other}) that ended meanwhile: move it away")
        return path
    write_atomically(path, lambda temporary: temporary.write_text(text, "utf-8"))
    return path


# --- checkpoints -----------------------------------------------------------------------------------------------------


FOLDER = "checkpoint"  # beside the result
SECONDS = Setting(60.0, "seconds between two checkpoints; 0: only after each task", high=1e6)
"""How often a run saves a checkpoint."""


def _settings(config: Config) -> dict[str, object]:
    """The settings without switches that are off: a new one does not change the description of earlier results."""
    return {name: value for name, value in config.settings.items() if value is not False}


def describe(config: Config) -> dict[str, object]:
    """Everything that determines a result. The preset's name is not part of it; its settings are."""
    return {
        "benchmark": config.benchmark,
        "method": config.method,
        "seeds": list(config.seeds),
        "tasks": config.tasks,
        "settings": _settings(config),
        "device": config.device,
        "precision": config.precision,
        **({"network": config.network} if config.network else {}),
        **({"scenario": config.scenario} if config.scenario else {}),
    }


def identity(config: Config) -> dict[str, object]:
    """The description of the configuration that a checkpoint belongs to."""
    about = describe(config)
    del about["settings"]
    return about | _settings(config)


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
    with deferred() as stop:
        yield replace(checkpoints.of(program_name(configs)), stop=checkpoints.stop or stop)


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
    programs = checkpoints.programs()
    if programs and not resume:
        raise EvclError(unfinished(folder))
    parts = [config] if config.device == "cuda" else config.cells
    own = {program_name([part]): identity(part) for part in parts}
    for path in programs:
        saved = newest(path)
        if saved is not None:
            check_identity(saved, [own.get(path.name, identity(config))])
    return replace(checkpoints, resume=bool(programs))
