"""The folder of a run: whose result it holds, who works in it, and writing a result there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evcl._core.errors import EvclError
from evcl._core.files import check_regular, locked, write_atomically
from evcl.experiments.result import RESULT, Result, read_result, to_json

if TYPE_CHECKING:
    from evcl.experiments.run import Config

LOCK = ".evcl-run.lock"  # in the folder of a result, while a run is at work there


def is_of(result: Result, config: Config) -> bool:
    """Whether a result is that of a configuration. Its preset, whose settings are all there, may have another name."""
    wanted = {**config.settings, "tasks": config.tasks, "precision": config.precision, "device": config.device}
    same = (result.benchmark, result.method, result.seeds) == (config.benchmark, config.method, list(config.seeds))
    return same and result.config | wanted == result.config


def open_folder(folder: Path, config: Config, overwrite: bool = False, name: str = RESULT) -> Result | None:
    """Make sure that the folder can take this run's result; returns the result if it is there already."""
    found = None
    try:
        if (folder / name).exists():
            check_regular(folder / name)
            found = read_result(folder / name)
    except EvclError as error:
        if not overwrite:
            raise EvclError(f"{error}: pass --overwrite or another --out") from None
    except OSError as error:
        raise EvclError(f"cannot write {folder / name}: {error.strerror or error}") from error
    if found is not None and not overwrite:
        if is_of(found, config) and found.preset == config.preset:
            return found
        raise EvclError(f"{folder} holds another run ({found.benchmark} {found.method}): pass --overwrite or --out")
    check_writable(folder)
    return None


def check_writable(folder: Path) -> None:
    """Make sure, before hours of training, that a result can be written there; nothing is left behind."""
    try:
        with _made(folder):
            probe = folder / ".evcl-writable"
            probe.touch()
            probe.unlink()
    except (OSError, ValueError) as error:
        raise EvclError(f"cannot write to {folder}: {getattr(error, 'strerror', None) or error}") from error


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """The folder is there for as long as this lasts, and if it was made for it, only then or with something in it."""
    made: list[Path] = []
    try:
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:  # a run that fails leaves nothing behind; `write_result` makes them again
        for path in made:
            with contextlib.suppress(OSError, ValueError):
                path.rmdir()


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """One run at a time in the folder of a result: a second is refused, so that neither is lost."""
    with contextlib.ExitStack() as stack:
        # Where nothing can be written, `open_folder` says so if it matters; some file systems have no locks.
        with contextlib.suppress(OSError, NotImplementedError):
            stack.enter_context(_made(folder))
            stack.enter_context(locked(folder / LOCK, f"{folder}: another evcl is at work on it"))
        yield


def write_result(folder: Path, result: Result | Mapping[str, Any], name: str = RESULT, overwrite: bool = False) -> Path:
    """Write `result.json`, whole or not at all. One that came there since `open_folder` looked is not replaced, unless
    with `overwrite`: if it is of the same run it is as good, and if of another this is an error.
    """
    path, text = folder / name, to_json(result)
    if path.exists() and not overwrite and isinstance(result, Result):
        found = read_result(path)
        if any(getattr(found, key) != getattr(result, key) for key in ("benchmark", "method", "config", "seeds")):
            other = f"{found.benchmark} {found.method}"
            raise EvclError(f"{path} is the result of another run ({other}) that ended meanwhile: move it away")
        return path

    def write(temporary: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, "utf-8")

    write_atomically(path, write)
    return path
