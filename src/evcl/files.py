"""Where files are kept, and writing one whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from evcl.errors import EvclError


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
