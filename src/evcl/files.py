"""Where files are kept, and writing one whole or not at all, and if need be only once."""

from __future__ import annotations

import contextlib
import errno
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


def write_once(path: Path, text: str) -> bool:
    """Write a file that is not there yet, whole or not at all; False if it is there, whoever wrote it.

    Of any number of processes, on a shared file system too, exactly one hears True: a hard link is made or refused by
    whoever keeps the files. A rename would replace what is there, and an exclusive open show a file half written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except OSError as error:
            if temporary.stat().st_nlink == 2:  # made, and the answer lost on its way from the server
                return True
            if isinstance(error, FileExistsError):
                return False
            if error.errno in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise EvclError(f"cannot write {path}: this file system has no hard links; use another") from error
            raise
    except OSError as error:
        raise EvclError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return True
