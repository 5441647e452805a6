"""The cache: verified arrays, one .npy file each, memory-mapped when used, and a JSON file that names their source.

    FOLDER/mnist/train_images.npy  …  source.json

Files are written atomically, and source.json last, so a folder that has it is complete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from evcl._core.bounds import MOST_JSON_BYTES
from evcl._core.errors import EvclError, extra
from evcl._core.files import cache_folder, check_regular, parsed, read_text, write_atomically
from evcl.data import progress
from evcl.data.catalog import CatalogEntry
from evcl.data.formats import BROKEN, Arrays, SourceFailed, UInt8

SOURCE_FILE = "source.json"


def folder(entry: CatalogEntry) -> Path:
    return cache_folder() / entry.name


def sha256(array: UInt8) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def check(entry: CatalogEntry, arrays: Arrays) -> None:
    """Raise unless the arrays are bit-identical to those in the catalogue."""
    for name, expected in entry.arrays.items():
        if name not in arrays:
            raise SourceFailed(f"{name} missing")
        array = arrays[name]
        if array.shape != expected.shape or array.dtype != np.uint8:
            raise SourceFailed(f"{name} is {array.dtype} of shape {array.shape}, not uint8 of shape {expected.shape}")
        if (digest := sha256(array)) != expected.sha256:
            raise SourceFailed(f"{name} has sha256 {digest[:12]}…, not {expected.sha256[:12]}…")


def write(entry: CatalogEntry, arrays: Arrays, source: str) -> None:
    """Write arrays that have passed `check` to the cache."""
    for name in entry.arrays:
        save(folder(entry) / f"{name}.npy", arrays[name])
    write_json(folder(entry) / SOURCE_FILE, {"data set": entry.name, "source": source})


def save(path: Path, array: UInt8) -> None:
    """Save one array as .npy. Not with `np.save`, which reports a full disk as a number of elements."""
    array = np.ascontiguousarray(array)

    def _write(temporary: Path) -> None:
        with temporary.open("wb") as out:
            np.lib.format.write_array_header_1_0(out, np.lib.format.header_data_from_array_1_0(array))
            out.write(array.data)

    write_atomically(path, _write)


def write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomically(path, lambda temporary: temporary.write_text(json.dumps(value, indent=1) + "\n"))


def read_json(path: Path) -> dict[str, Any]:
    try:
        if not path.exists():
            raise SourceFailed("not there")
        content = parsed(read_text(path, MOST_JSON_BYTES))
    except SourceFailed:
        raise
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        raise SourceFailed(f"{path} is damaged")
    return content


def load(path: Path, shape: tuple[int, ...]) -> UInt8:
    """Memory-map one array. Its header and size are checked, but not its bytes (`evcl data verify` does that).

    The map is copy-on-write: torch needs writable memory, and nothing written to it reaches the file.
    """
    try:
        check_regular(path)
        array: UInt8 = np.lib.format.open_memmap(path, mode="c")  # unlike np.load, reads no pickle and no .zip
    except BROKEN:
        raise SourceFailed(f"{path} is {'damaged' if path.exists() else 'missing'}") from None
    if array.shape != shape or array.dtype != np.uint8 or not array.flags.c_contiguous:
        raise SourceFailed(f"{path} is damaged: {array.dtype} of shape {array.shape}, not uint8 of shape {shape}")
    return array


def read(entry: CatalogEntry) -> Arrays:
    """The cached arrays, memory-mapped. Raises SourceFailed if something is missing or damaged."""
    read_json(folder(entry) / SOURCE_FILE)
    return {name: load(folder(entry) / f"{name}.npy", array.shape) for name, array in entry.arrays.items()}


def read_intact(entry: CatalogEntry) -> Arrays:
    """The cached arrays, with every byte checked."""
    arrays = read(entry)
    for name, expected in entry.arrays.items():
        if sha256(arrays[name]) != expected.sha256:
            raise SourceFailed(f"{folder(entry) / name}.npy is damaged: its checksum is not that of {entry.name}")
    return arrays


@contextmanager
def locked(entry: CatalogEntry) -> Iterator[None]:
    """Lock a data set, so that one process at a time fetches it; the others wait and then find it in the cache."""
    with extra("data", "fetching a data set needs filelock, Pillow and rich"):
        import PIL  # noqa: F401  (here, before anything is fetched)
        import rich  # noqa: F401
        from filelock import FileLock, Timeout

    place = folder(entry)
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = FileLock(place / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress.say(f"{entry.name}: waiting for another process that is fetching it")
            lock.acquire()
    except OSError as error:
        raise EvclError(
            f"cannot write to the cache {place} ({error.strerror or error}): choose another folder with EVCL_CACHE"
        ) from error
    try:
        for left in place.glob(".*.tmp"):  # left by a process that was killed while writing
            left.unlink(missing_ok=True)
        yield
    finally:
        lock.release()
