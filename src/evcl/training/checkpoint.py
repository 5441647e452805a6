"""Checkpoints on disk: their folders, one file, and the writer that all unfinished work uses.

A checkpoint is one safetensors file: tensors, a description in JSON, and a digest of both. Reading one executes no
code; the work that resumes from it checks its contents, by `Saved`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.files import described, open_tensors, save_tensors

FORMAT = 3  # raise this when the buffers of a step change
DESCRIPTION, DIGEST = "evcl-checkpoint", "digest"
PROGRAM_FOLDERS = ("seed-*", "program-*")
START_AGAIN = "remove it, or start again with --overwrite"
Identity = list[dict[str, Any]]  # what a checkpoint belongs to: the configurations of a program, as JSON
CHECKPOINT_NAME = re.compile(r"(\d{8,20})\.safetensors|\.\d{8,20}\.safetensors\..*\.tmp")  # or of a half-written one


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often a run saves checkpoints, and whether it resumes from existing ones.

    Every program has its own folder inside `folder`. A checkpoint is written every `seconds` seconds and at the end of
    each task; with 0, only at the end of each task. `stop` returns True if the run should save itself and end.
    """

    folder: Path
    seconds: float = 60.0
    resume: bool = False
    stop: Callable[[], bool] | None = None

    def of(self, program: str) -> Checkpoints:
        """The checkpoints of one program."""
        return replace(self, folder=self.folder / program)

    def programs(self) -> list[Path]:
        """The folders of programs that have saved something."""
        try:
            return sorted(folder for folder in self._folders() if files(folder))
        except OSError as error:
            raise EvclError(f"cannot read {self.folder}: {error.strerror or error}") from error

    def remove(self) -> None:
        """Remove the checkpoints, and the folders if nothing else is in them."""
        with contextlib.suppress(OSError):
            for folder in self._folders():
                clear(folder, [])
                with contextlib.suppress(OSError):
                    folder.rmdir()
            self.folder.rmdir()

    def remove_own(self) -> None:
        """Remove the checkpoints of one program, which are in this folder itself."""
        clear(self.folder, [])
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _folders(self) -> list[Path]:
        return [folder for name in PROGRAM_FOLDERS for folder in self.folder.glob(name)]


class OtherFormat(EvclError):
    """A checkpoint of another version of evcl."""


class Unfit(EvclError):
    """A checkpoint whose contents do not fit the run."""


class AnotherRun(EvclError):
    """A checkpoint that belongs to another run; `difference` says how the two differ."""

    def __init__(self, message: str = "", difference: str = "") -> None:
        super().__init__(message)
        self.difference = difference


class Stopped(BaseException):
    """Raised to end a run that was asked to stop; it can be resumed from its last checkpoint, if there is one."""


class Saved(NamedTuple):
    """The contents of a checkpoint."""

    path: Path
    description: dict[str, Any]
    tensors: dict[str, Tensor]

    def unfit(self, what: object) -> Unfit:
        return Unfit(f"the checkpoint {self.path} does not fit the run ({what}): {START_AGAIN}")

    @contextlib.contextmanager
    def fitting(self) -> Iterator[None]:
        """Errors inside are those of a checkpoint that does not fit the run."""
        try:
            yield
        except Unfit:
            raise
        except (EvclError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise self.unfit(error) from error

    def whole(self, key: str, below: int) -> int:
        """A whole number of the description, from 0 to `below` - 1."""
        value: object = self.description.get(key)
        if type(value) is not int or not 0 <= value < below:
            raise self.unfit(f"{key} is {str(value)[:60]!r}, but there are only {below}")
        return value

    @property
    def seconds(self) -> float:
        """How long the work had taken."""
        value = self.description.get("seconds")
        if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise self.unfit(f"seconds {str(value)[:60]!r}")
        return float(value)

    def named(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names have this prefix, without it."""
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}

    def tensor(self, name: str, like: Tensor) -> Tensor:
        """A tensor that must have the shape and dtype of another, on its device."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise self.unfit(f"{name} must be {like.dtype} {tuple(like.shape)}")
        return tensor.to(like.device)


def files(folder: Path) -> list[Path]:
    """A program's checkpoints, newest first."""
    paths = [path for path in folder.glob("*.safetensors") if CHECKPOINT_NAME.fullmatch(path.name)]
    return sorted((path for path in paths if not path.name.startswith(".")), key=lambda p: int(p.stem), reverse=True)


def write(path: Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write one checkpoint; it is on disk when this returns."""
    text = json.dumps({"format": FORMAT, **description}, allow_nan=False)
    copies = {  # safetensors needs tensors that do not share memory
        name: t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for name, t in tensors.items()
    }
    save_tensors(path, copies, {DESCRIPTION: text, DIGEST: digest(text, copies)})


def read(path: Path) -> Saved:
    """Read one checkpoint, and verify its digest."""
    try:
        with open_tensors(path) as file:
            metadata = file.metadata() or {}
            text = metadata[DESCRIPTION]
            described(file, DESCRIPTION)  # raises if it is too long
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is not a dict)
        if metadata[DIGEST] != digest(text, tensors):
            raise EvclError("its digest does not match")
        description = json.loads(text)
        if description["format"] != FORMAT:
            raise OtherFormat(
                f"the checkpoint {path} was written by another version of evcl (format {description['format']!r}, but "
                f"this one reads {FORMAT}): finish the run with that version, or remove it (--overwrite starts again)"
            )
    except OtherFormat:
        raise
    except OSError as error:
        raise EvclError(f"cannot read the checkpoint {path}: {error.strerror or error}") from error
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError, RuntimeError) as error:
        raise EvclError(f"the checkpoint {path} is damaged ({type(error).__name__} {error})") from error
    return Saved(path, description, tensors)


def newest(folder: Path) -> Saved | None:
    """The newest intact checkpoint of a program; None if there are no checkpoints."""
    paths = files(folder)
    errors = []
    for path in paths:
        try:
            return read(path)
        except OtherFormat:
            raise
        except EvclError as error:
            errors.append(str(error))
    if errors:
        raise EvclError(f"{'; '.join(errors)}: {START_AGAIN}")
    return None


def clear(folder: Path, keep: list[Path]) -> None:
    """Remove a program's other checkpoints, and files left by interrupted writes."""
    with contextlib.suppress(OSError):
        for path in set(folder.iterdir()) - set(keep):
            if CHECKPOINT_NAME.fullmatch(path.name):
                path.unlink(missing_ok=True)


def digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Of a checkpoint: of its description and its tensors."""
    hasher = hashlib.blake2b(text.encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


class Resumable(Protocol):
    """Work that a checkpoint saves, and that goes on from one."""

    def position(self) -> dict[str, Any]:
        """How far it is, as JSON."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Everything that it has changed, by name."""
        ...

    def load(self, saved: Saved) -> None:
        """Go on from there; raise if the contents do not fit."""
        ...


class Writer:
    """Writes the checkpoints of one program, and reads the one to resume from.

    `identity` says what they belong to: the checkpoint of anything else is refused. If a file cannot be written, the
    user is told, and the work continues. With `writes` False, another process writes for this one.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        identity: Identity,
        environment: Mapping[str, Any],
        tell: Callable[[str], object] = lambda note: None,
        writes: bool = True,
    ) -> None:
        """`checkpoints` are those of this program. `tell` receives messages for the user."""
        self.checkpoints, self.tell, self.writes = checkpoints, tell, writes
        self.identity: Identity = json.loads(json.dumps(identity))
        self.environment = dict(environment)
        self.saved = self._newest()  # what is still to be resumed
        self._before = 0.0 if self.saved is None else self.saved.seconds
        self._files = [] if self.saved is None else [self.saved.path]  # the last two: one may be damaged
        self._start = self._last = time.monotonic()
        self._failure: str | None = None

    @property
    def seconds(self) -> float:
        """Seconds that the program has run, including the time before it was resumed."""
        return self._before + time.monotonic() - self._start

    def stopping(self) -> bool:
        return self.checkpoints.stop is not None and self.checkpoints.stop()

    def due(self) -> bool:
        """Whether to save: it is time to, or the work is asked to end."""
        seconds = self.checkpoints.seconds
        return self.stopping() or (seconds > 0 and time.monotonic() - self._last >= seconds)

    def resume(self, work: Resumable) -> bool:
        """Let the work go on from the checkpoint, if there is one."""
        if self.saved is None:
            return False
        with self.saved.fitting():
            work.load(self.saved)
        self.saved = None
        return True

    def save(self, work: Resumable) -> None:
        """Save the work, and end it here if asked to."""
        self.write(work)
        if self.stopping():
            raise Stopped

    def write(self, work: Resumable) -> None:
        self._last = time.monotonic()
        if not self.writes:
            return
        folder = self.checkpoints.folder
        path = folder / f"{int(self._files[-1].stem) + 1 if self._files else 1:08d}.safetensors"
        about = {"owner": self.identity, "environment": self.environment, "seconds": self.seconds}
        try:
            if not self._files:  # not later: a folder that vanished may be on a disk that comes back
                folder.mkdir(parents=True, exist_ok=True)
            write(path, {**about, **work.position()}, work.tensors())
        except (EvclError, OSError) as error:
            reason = str(error) if isinstance(error, EvclError) else f"cannot write {path}: {error.strerror or error}"
            if self._failure is None:
                last = f"the last checkpoint is {self._files[-1]}" if self._files else "there is no checkpoint yet"
                self.tell(f"{reason}; training continues, and {last}")
            self._failure = reason
        else:
            if self._failure is not None:
                self.tell(f"checkpoints can be written again: {path}")
            self._failure, self._files = None, [*self._files[-1:], path]
            clear(folder, self._files)
        self._last = time.monotonic()

    def _newest(self) -> Saved | None:
        """The checkpoint to resume from."""
        folder = self.checkpoints.folder
        if not self.checkpoints.resume:
            if files(folder):
                raise EvclError(unfinished(folder))
            return None
        saved = newest(folder)
        if saved is not None:
            check_identity(saved, self.identity)
            if self.writes:
                clear(folder, files(folder))  # files left by interrupted writes
            if saved.description.get("environment") != self.environment:
                self.tell(f"{saved.path} was written in another environment: results may differ by rounding")
        return saved


def unfinished(folder: object) -> str:
    return (
        f"{folder} contains the checkpoint of an unfinished run: "
        "pass --resume to continue it, or --overwrite to start again"
    )


def check_identity(saved: Saved, identity: Identity) -> None:
    """Raise unless the checkpoint belongs to the same program."""
    theirs = saved.description.get("owner")
    if theirs != identity:
        difference = _difference(identity, theirs)
        what = f"{saved.path} is a checkpoint of another run ({difference})"
        raise AnotherRun(f"{what}: pass --overwrite or another --out", difference)


def _difference(ours: Identity, theirs: object) -> str:
    for own, other in zip(ours, theirs if isinstance(theirs, list) else (), strict=False):
        for key, value in own.items():
            there = other.get(key) if isinstance(other, dict) else None
            if there != value:
                return f"{key} is {str(there)[:60]} there and {str(value)[:60]} here"
    return "of other configurations"
