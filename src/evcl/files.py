"""Where files are kept; reading a text of a bounded size, and writing a file whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evcl.errors import EvclError


def cache_folder() -> Path:
    """EVCL_CACHE, else the platform's folder for caches."""
    given = os.environ.get("EVCL_CACHE")
    if given:
        return Path(given).expanduser().absolute()
    import pooch

    return Path(pooch.os_cache("evcl"))


def read_text(path: Path, most: int) -> str:
    """A text file in UTF-8 of at most so many bytes."""
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except (OSError, ValueError) as error:
        raise EvclError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(content) > most:
        raise EvclError(f"{path} has more than the {most:,} bytes that it may have")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EvclError(f"{path} is not UTF-8 (byte {error.start + 1})") from error


def parsed(text: str) -> Any:
    """What a JSON text says; whatever is wrong with it is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


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
