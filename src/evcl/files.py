"""Where files are kept, and writing one whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from evcl.errors import EvclError

if TYPE_CHECKING:
    from torch import Tensor


def cache_folder() -> Path:
    """EVCL_CACHE, else the platform's folder for caches."""
    given = os.environ.get("EVCL_CACHE")
    if given:
        return Path(given).expanduser().absolute()
    import pooch

    return Path(pooch.os_cache("evcl"))


def write_atomically(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Call `write` on a temporary neighbour of `path`, then put it in its place."""
    try:
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    except (TypeError, ValueError) as error:
        raise EvclError(f"cannot write to {str(path)!r}: {error}") from error
    try:
        write(temporary)
        temporary.replace(path)
    except EvclError:  # a ValueError too, and of something else than writing
        raise
    except (OSError, ValueError) as error:
        raise EvclError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        with contextlib.suppress(OSError, ValueError):
            temporary.unlink(missing_ok=True)


def save_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str], sync: bool = False
) -> None:
    """Write a safetensors file, whole or not at all; with `sync`, what is in its place is on the disk too."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    def write(temporary: Path) -> None:
        try:
            save_file(dict(tensors), temporary, dict(metadata))
        except SafetensorError as error:
            raise OSError(str(error)) from error
        if sync:  # or a machine that goes down could leave the name without the bytes
            with temporary.open("rb") as file:
                os.fsync(file.fileno())

    write_atomically(path, write)
