"""Where files are kept; reading a text of a bounded size; writing a file whole or not at all, if need be only once;
holding one against other processes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from evcl._core.errors import EvclError, extra

if TYPE_CHECKING:
    from torch import Tensor


def cache_folder() -> Path:
    """EVCL_CACHE, else the platform's folder for caches."""
    given = os.environ.get("EVCL_CACHE")
    if given:
        return Path(given).expanduser().absolute()
    # The same folders as platformdirs names; written out, because `import evcl` must do without it.
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if sys.platform != "win32" and xdg.is_absolute():
        return xdg / "evcl"
    try:
        home = Path.home()
    except RuntimeError:
        raise EvclError("there is no home folder to keep a cache in: name a folder with EVCL_CACHE") from None
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "evcl" / "evcl" / "Cache"
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "evcl"


OTHERS = {  # what may stand where a file is expected
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: Path | int) -> None:
    """An OSError unless this is a regular file, or a link to one: whoever opens a pipe may wait for ever."""
    mode = (os.fstat(path) if isinstance(path, int) else path.stat()).st_mode
    if not stat.S_ISREG(mode):
        found = OTHERS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {found}, and a regular file is expected")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read its bytes; without waiting, whatever it is."""

    def opener(name: str, flags: int) -> int:
        number = os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
        try:
            check_regular(number)
        except OSError:
            os.close(number)
            raise
        return number

    return open(path, "rb", opener=opener)


def read_text(path: Path, most: int) -> str:
    """A text file in UTF-8 of at most this many bytes."""
    try:
        with open_regular(path) as file:
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
    """Call `write` on a temporary neighbour of `path`, then put it in its place.

    A link stays a link: the file that it leads to is written. What is there and is no regular file is refused.
    """
    try:
        path = Path(path)
        real = Path(os.path.realpath(path))
        temporary = real.with_name(f".{real.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    except (TypeError, ValueError) as error:
        raise EvclError(f"cannot write to {str(path)!r}: {error}") from error
    try:
        with contextlib.suppress(FileNotFoundError):
            check_regular(path)
        write(temporary)
        temporary.replace(real)
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


@contextlib.contextmanager
def locked(lock: Path, what: str) -> Iterator[None]:
    """Hold a lock file for this process alone, and remove it at the end. While another holds it: an EvclError that
    begins with `what`, and says who and since when.

    The system frees what a process held when it ends, however it ends: a file that a killed one left holds nobody up.
    """
    with extra("cli", "locking a file needs filelock"):
        from filelock import FileLock, Timeout

    try:
        holder = read_text(lock, 1000).strip()
    except EvclError:  # there is none
        holder = ""
    held = FileLock(lock)
    try:
        held.acquire(timeout=0)
    except Timeout:
        raise EvclError(f"{what}{holder and f' ({holder})'}; wait for it to end") from None
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        with contextlib.suppress(OSError):  # a disk that is full, say: it is for others to read
            lock.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n", "utf-8")
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()  # while it is held: nobody else can have it
        held.release()


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
