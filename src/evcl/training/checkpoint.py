"""Checkpoints on disk: their folders, and writing and reading one file atomically.

A checkpoint is one safetensors file: tensors, a description in JSON, and a digest of both. Reading one executes no
code; the caller that resumes from it checks its contents.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.files import described, open_tensors, save_tensors

FORMAT = 3  # raise this when the buffers of a step change
DESCRIPTION, DIGEST = "evcl-checkpoint", "digest"
PROGRAMS = ("seed-*", "program-*")
NAME = re.compile(r"(\d{8,20})\.safetensors|\.\d{8,20}\.safetensors\..*\.tmp")  # of a checkpoint, or a half-written one


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
        return [folder for name in PROGRAMS for folder in self.folder.glob(name)]


class OtherFormat(EvclError):
    """A checkpoint of another version of evcl."""


class Saved(NamedTuple):
    """The contents of a checkpoint."""

    path: Path
    description: dict[str, Any]
    tensors: dict[str, Tensor]


def files(folder: Path) -> list[Path]:
    """A program's checkpoints, newest first."""
    found = [path for path in folder.glob("*.safetensors") if NAME.fullmatch(path.name)]
    return sorted((path for path in found if not path.name.startswith(".")), key=lambda p: int(p.stem), reverse=True)


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
    found = files(folder)
    errors = []
    for path in found:
        try:
            return read(path)
        except OtherFormat:
            raise
        except EvclError as error:
            errors.append(str(error))
    if errors:
        raise EvclError(f"{'; '.join(errors)}: remove it, or start again with --overwrite")
    return None


def clear(folder: Path, keep: list[Path]) -> None:
    """Remove a program's other checkpoints, and files left by interrupted writes."""
    with contextlib.suppress(OSError):
        for path in set(folder.iterdir()) - set(keep):
            if NAME.fullmatch(path.name):
                path.unlink(missing_ok=True)


def digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Of a checkpoint: of its description and its tensors."""
    found = hashlib.blake2b(text.encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
