"""File utilities: the cache folder, reading text of bounded size, writing files atomically or only once, lock files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from evcl._core.bounds import MOST_DESCRIPTION, MOST_HEADER, MOST_TENSORS
from evcl._core.errors import EvclError, extra

if TYPE_CHECKING:
    from torch import Tensor


def cache_folder() -> Path:
    """The folder named by EVCL_CACHE, or else the platform's cache folder."""
    given = os.environ.get("EVCL_CACHE")
    if given:
        return Path(given).expanduser().absolute()
    # The same folders as in platformdirs, which `import evcl` must not need.
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if sys.platform != "win32" and xdg.is_absolute():
        return xdg / "evcl"
    try:
        home = Path.home()
    except RuntimeError:
        raise EvclError("there is no home folder for the cache: name a folder with EVCL_CACHE") from None
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "evcl" / "evcl" / "Cache"
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "evcl"


TEMPORARY = ".tmp"  # the end of the name of a file that is being written
LONGEST_PART = 200  # characters of a file's name in that of its temporary file: names have at most 255 bytes
MADE = re.compile(rf"\d+-[0-9a-f]{{8}}{re.escape(TEMPORARY)}")
KINDS = {  # torch's types, as safetensors calls them
    **{f"int{size}": f"I{size}" for size in (8, 16, 32, 64)},
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL", "uint8": "U8"},
}
# What a path may be other than a regular file, by the first letter of its mode.
NOT_REGULAR_FILES = {"d": "a folder", "p": "a pipe", "s": "a socket", "c": "a device", "b": "a device"}


def check_regular(path: Path | int) -> None:
    """Raise an OSError unless this is a regular file or a link to one: opening a pipe could block for ever."""
    mode = (os.fstat(path) if isinstance(path, int) else path.stat()).st_mode
    if not stat.S_ISREG(mode):
        kind = NOT_REGULAR_FILES.get(stat.filemode(mode)[0], "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading bytes. Anything else raises an OSError, without blocking."""

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
    """Read a UTF-8 text file of at most `most` bytes."""
    try:
        with open_regular(path) as file:
            content = file.read(most + 1)
    except (OSError, ValueError) as error:
        raise EvclError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(content) > most:
        raise EvclError(f"{path} is larger than the limit of {most:,} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EvclError(f"{path} is not UTF-8 (byte {error.start + 1})") from error


def parsed(text: str) -> Any:
    """Parse JSON; raise a ValueError for any invalid text."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def in_lines(content: object, depth: int, indent: str = "") -> str:
    """JSON with one line per entry in the outer `depth` levels; deeper levels stay on the line of their entry. Such a
    file gives readable diffs, without a line for every number.
    """
    if not depth or not content or not isinstance(content, dict | list):
        return json.dumps(content, allow_nan=False)
    inner = f"{indent} "
    if isinstance(content, dict):
        (opened, closed), keys, values = "{}", [f"{json.dumps(key)}: " for key in content], list(content.values())
    else:
        (opened, closed), keys, values = "[]", [""] * len(content), content
    lines = [f"{inner}{key}{in_lines(value, depth - 1, inner)}" for key, value in zip(keys, values, strict=True)]
    return "\n".join([opened, ",\n".join(lines), f"{indent}{closed}"])


def write_atomically(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path in the same folder, then rename the result to `path`.

    If `path` is a link, the link stays and its target is replaced. An existing path that is not a regular file is
    refused. A new file has the mode that the umask allows, an existing one keeps its mode. When this returns, the file
    and its name are on disk.
    """
    try:
        path = Path(path)
        real = Path(os.path.realpath(path))
        temporary = real.with_name(f".{real.name[:LONGEST_PART]}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}")
    except (OSError, TypeError, ValueError) as error:
        raise EvclError(f"cannot write to {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
    try:
        mode = None
        with contextlib.suppress(FileNotFoundError):
            check_regular(path)
            mode = stat.S_IMODE(path.stat().st_mode)
        write(temporary)
        if mode is not None:
            temporary.chmod(mode)
        with temporary.open("rb") as file:  # otherwise a power cut could leave the name without its contents
            os.fsync(file.fileno())
        temporary.replace(real)
        sync_folder(real.parent)
    except EvclError:  # also a ValueError, but not caused by writing
        raise
    except (OSError, ValueError) as error:
        raise EvclError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        with contextlib.suppress(OSError, ValueError):
            temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Write a folder's names to disk, where the system has folders that can be synced."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def remove_leftovers(path: Path) -> None:
    """Remove temporary files that killed writers of `path` left. The caller holds its lock: nobody else writes it."""
    real = Path(os.path.realpath(path))
    begin = f".{real.name[:LONGEST_PART]}."
    with contextlib.suppress(OSError):
        for left in real.parent.iterdir():
            if left.name.startswith(begin) and MADE.fullmatch(left.name[len(begin) :]):
                left.unlink(missing_ok=True)


class NoHardLinks(EvclError):
    """The file system has no hard links."""


def write_once(path: Path, text: str) -> bool:
    """Create a file atomically and return True; return False if it exists already, whichever process wrote it.

    However many processes call this, exactly one gets True, even on a shared file system: the file server either makes
    the hard link or refuses it. A rename would replace an existing file, and opening the file exclusively would let
    other processes see it half written.
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
            if temporary.stat().st_nlink == 2:  # the link was made, but the server's reply was lost
                return True
            if isinstance(error, FileExistsError):
                return False
            if error.errno in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise NoHardLinks(f"cannot write {path}: this file system has no hard links; use another") from error
            raise
    except OSError as error:
        raise EvclError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return True


@contextlib.contextmanager
def locked(lock: Path, what: str) -> Iterator[None]:
    """Hold a lock file for this process alone, and remove it at the end. If another process holds it, raise an
    EvclError that begins with `what` and says which process holds the lock and since when.

    The operating system releases a lock when its process ends for any reason, so the lock file of a killed process does
    not block others.
    """
    with extra("cli", "locking a file needs filelock"):
        from filelock import FileLock, Timeout

    try:
        holder = read_text(lock, 1000).strip()
    except EvclError:  # there is no lock file
        holder = ""
    held = FileLock(lock)
    try:
        held.acquire(timeout=0)
    except Timeout:
        raise EvclError(f"{what}{holder and f' ({holder})'}; wait for it to end") from None
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        with contextlib.suppress(OSError):  # such as a full disk; the text only informs other processes
            lock.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n", "utf-8")
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()  # while the lock is held, so that no other process can hold it
        held.release()


@contextlib.contextmanager
def open_tensors(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Open a safetensors file, whose header is limited before it is read. Only regular files are opened."""
    from safetensors import safe_open

    with open_regular(Path(path)) as file:
        size, whole = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
    if MOST_HEADER < size < whole:
        raise EvclError(f"its header has {size:,} bytes, but the maximum is {MOST_HEADER:,}")
    with safe_open(path, framework="pt") as tensors:
        if len(tensors.keys()) > MOST_TENSORS:
            raise EvclError(f"it has {len(tensors.keys()):,} tensors, but the maximum is {MOST_TENSORS:,}")
        yield tensors


def described(file: Any, name: str) -> Any:
    """The JSON text of this name in a safetensors file; None if it has none."""
    text = (file.metadata() or {}).get(name)
    if text is None:
        return None
    if len(text) > MOST_DESCRIPTION:
        raise EvclError(f"its description has {len(text):,} characters, but the maximum is {MOST_DESCRIPTION:,}")
    return parsed(text)


def save_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file atomically. Its bytes are written here, one tensor after another: safetensors has
    temporary files of its own, with modes of their own, which a killed process leaves behind.

    The file is the length of a header, the header in JSON, and the tensors, those of wider types first, so that each is
    aligned.
    """
    for text in metadata.values():
        if len(text) > MOST_DESCRIPTION:
            what = "names of tasks, classes and categories, and the history"
            raise EvclError(f"the description ({what}) has {len(text):,} characters, but at most {MOST_DESCRIPTION:,}")
    if len(tensors) > MOST_TENSORS:
        raise EvclError(f"there are {len(tensors):,} tensors, but a file may hold {MOST_TENSORS:,}")
    if sys.byteorder != "little":
        raise EvclError("model files are written on little-endian machines only")
    kinds = {name: KINDS.get(str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()}
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    for name in order:
        tensor = tensors[name]
        if kinds[name] is None:
            raise EvclError(f"{name} is {tensor.dtype}, which a model file cannot hold")
        end = place + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": kinds[name], "shape": list(tensor.shape), "data_offsets": [place, end]}
        place = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)

    write_atomically(path, lambda temporary: write_tensors(temporary, head, [tensors[name] for name in order]))


def write_tensors(path: Path, head: bytes, tensors: Sequence[Tensor]) -> None:
    """Write a header, and the tensors after it."""
    import torch

    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in tensors:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
