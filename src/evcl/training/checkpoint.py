"""Checkpoints on disk: where they lie, one file written and read back, whole or not at all.

A checkpoint is one safetensors file: tensors, a description in JSON, and a digest of both. Reading one executes no
code; what it says is checked by whoever goes on from it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.files import save_tensors

FORMAT = 3  # raised when a step has other buffers
KEPT = 2  # checkpoints of a program: the last one, and one more in case that is damaged
DESCRIPTION, DIGEST = "evcl-checkpoint", "digest"
PROGRAMS = ("seed-*", "program-*")
FILES, TEMPORARY = f"{'[0-9]' * 8}.safetensors", f".{'[0-9]' * 8}.safetensors.*.tmp"


@dataclass(frozen=True)
class Checkpoints:
    """Where a run saves itself, how often, and whether it goes on from what is there.

    In `folder` every program has a folder of its own. `seconds` lie between two checkpoints; at a task's end there is
    one in any case, and with 0 only there. `stop` says that it should save itself and end.
    """

    folder: Path
    seconds: float = 60.0
    resume: bool = False
    stop: Callable[[], bool] | None = None

    def of(self, program: str) -> Checkpoints:
        """Those of one program."""
        return replace(self, folder=self.folder / program)

    def programs(self) -> list[Path]:
        """The folders of programs that have saved something."""
        try:
            return sorted(folder for folder in self._folders() if files(folder))
        except OSError as error:
            raise EvclError(f"cannot read {self.folder}: {error.strerror or error}") from error

    def remove(self) -> None:
        """The checkpoints, and the folders if nothing else is in them."""
        with contextlib.suppress(OSError):
            for folder in self._folders():
                clear(folder, [])
                with contextlib.suppress(OSError):
                    folder.rmdir()
            self.folder.rmdir()

    def remove_own(self) -> None:
        """The checkpoints of one program that lie in this folder itself."""
        clear(self.folder, [])
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _folders(self) -> list[Path]:
        return [folder for name in PROGRAMS for folder in self.folder.glob(name)]


class OtherFormat(EvclError):
    """A checkpoint of another version of evcl."""


class Saved(NamedTuple):
    """What a checkpoint holds."""

    path: Path
    description: dict[str, Any]
    tensors: dict[str, Tensor]


def files(folder: Path) -> list[Path]:
    """A program's checkpoints, the newest first."""
    return sorted(folder.glob(FILES), reverse=True)


def write(path: Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """One checkpoint, on the disk when this returns."""
    text = json.dumps({"format": FORMAT, **description}, allow_nan=False)
    copies = {  # which share no memory: safetensors wants it so
        name: t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for name, t in tensors.items()
    }
    save_tensors(path, copies, {DESCRIPTION: text, DIGEST: _digest(text, copies)}, sync=True)


def read(path: Path) -> Saved:
    """One checkpoint, found to be what was written."""
    try:
        if not path.is_file():
            raise EvclError("it is no file")
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            text = metadata[DESCRIPTION]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
        if metadata[DIGEST] != _digest(text, tensors):
            raise EvclError("its digest is another")
        description = json.loads(text)
        if description["format"] != FORMAT:
            raise OtherFormat(
                f"the checkpoint {path} was written by another version of evcl (format {description['format']!r}, and "
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
    """The last checkpoint of a program that is whole; None if there is none at all."""
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
    """Remove a program's other checkpoints, and what a write that was cut off has left."""
    with contextlib.suppress(OSError):
        for path in {*folder.glob(FILES), *folder.glob(TEMPORARY)} - set(keep):
            path.unlink(missing_ok=True)


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.blake2b(text.encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
