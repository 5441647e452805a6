"""Data sets by name: fetched once, verified, and from then on memory-mapped from the cache."""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from evcl._core.errors import EvclError
from evcl.data import cache, sources
from evcl.data.catalog import ARRAYS, CATALOG, CatalogEntry
from evcl.data.formats import SourceFailed, UInt8, grey28

GREY = "grey28.json"


@dataclass(frozen=True)
class Dataset:
    """Images [N, H, W] or [N, H, W, 3] and labels [N], uint8, memory-mapped: writing to them does not reach the cache.

    notmnist has no published split: `train_*` hold all of it, in the order of the catalogue, and `test_*` are empty.
    """

    name: str
    train_images: UInt8
    train_labels: UInt8
    test_images: UInt8
    test_labels: UInt8


@dataclass(frozen=True)
class Status:
    """What the cache holds of a data set. `problem` is empty if nothing is wrong."""

    name: str
    folder: Path
    fetched: bool
    bytes: int
    source: str
    problem: str


@dataclass(frozen=True)
class Verified:
    """A data set of which every byte was checked.

    `shared` counts test images that are also training images; `copies` counts training images, or texts, that duplicate
    an earlier one.
    """

    name: str
    source: str
    bytes: int
    test_images: int
    shared: int
    copies: int


def load(name: str, data_dir: Path | None = None, offline: bool | None = None) -> Dataset:
    """Load the data set with this name, fetching it if the cache does not have it.

    A complete cache is used first, because the bytes are the same whatever the source.
    With `offline` (or EVCL_OFFLINE=1), only the user's folder (`data_dir`, or EVCL_DATA) and the cache are used.
    """
    entry = CATALOG[name]
    if not entry.images:
        raise EvclError(f"{name} has no images: read its arrays with evcl.data.load_arrays({name!r})")
    return _dataset(entry, load_arrays(name, data_dir, offline))


def load_arrays(name: str, data_dir: Path | None = None, offline: bool | None = None) -> dict[str, UInt8]:
    """The arrays of any data set, by name: see `load`. Those of texts and of weights are bytes."""
    entry = CATALOG[name]
    _check_folder(data_dir)
    with contextlib.suppress(SourceFailed):
        return cache.read(entry)
    fetch(name, data_dir, offline)
    return cache.read(entry)


def load_texts(name: str, data_dir: Path | None = None, offline: bool | None = None) -> tuple[list[str], UInt8]:
    """A data set of texts: the texts, of which bytes that are not UTF-8 are read as Latin-1, and their labels."""
    arrays = load_arrays(name, data_dir, offline)
    if "texts" not in arrays:
        raise EvclError(f"{name} has no texts")
    return [_decoded(text) for text in arrays["texts"].tobytes().split(b"\0")[:-1]], arrays["labels"]


def _decoded(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        return text.decode("latin-1")


def fetch(name: str, data_dir: Path | None = None, offline: bool | None = None) -> Status:
    """Fetch a data set into the cache. If it is already there, every byte is checked, and damaged data is replaced."""
    entry = CATALOG[name]
    _check_folder(data_dir)
    with contextlib.suppress(SourceFailed):
        _intact(entry)
        return status(name)  # needs no lock, so it also works with a read-only cache
    with cache.locked(entry):
        problem = ""
        try:
            cache.read_intact(entry)
        except SourceFailed as error:
            problem = f"cache {cache.folder(entry)}: {error}"
        if problem:
            _drop_grey(entry)  # they may have been made from damaged data
            arrays, source = sources.obtain(entry, data_dir, _offline(offline), [problem])
            cache.write(entry, arrays, source)
            if source in entry.mirrors:
                sources.tidy(entry)
        try:
            _verify_grey(entry)
        except SourceFailed:
            _drop_grey(entry)
    return status(name)


def status(name: str) -> Status:
    """What the cache holds of this data set, without reading its bytes."""
    entry = CATALOG[name]
    place, source, problem = cache.folder(entry), "", ""
    try:
        source = str(cache.read_json(place / cache.SOURCE_FILE).get("source", ""))
        cache.read(entry)
    except SourceFailed as error:
        problem = str(error)
    size = sum(path.stat().st_size for path in place.glob("*.npy"))
    return Status(name, place, (place / cache.SOURCE_FILE).exists(), size, source, problem)


def verify(name: str) -> Verified:
    """Check every cached byte of this data set, and count duplicate images."""
    entry = CATALOG[name]
    try:
        arrays = _intact(entry)
    except SourceFailed as error:
        raise EvclError(f"{name}: {error}; run evcl data fetch {name}") from error
    here = status(name)
    if not entry.images:
        texts = arrays["texts"].tobytes().split(b"\0")[:-1] if "texts" in arrays else []
        return Verified(name, here.source, here.bytes, 0, 0, len(texts) - len(set(texts)))
    dataset = _dataset(entry, arrays)
    train, test = _digests(dataset.train_images), _digests(dataset.test_images)
    known = set(train)
    shared = sum(digest in known for digest in test)
    return Verified(name, here.source, here.bytes, len(test), shared, len(train) - len(known))


def load_grey28(name: str = "cifar10", data_dir: Path | None = None, offline: bool | None = None) -> Dataset:
    """A colour data set as 28 x 28 grey images (see `grey28`), made once and then memory-mapped from the cache."""
    entry = CATALOG[name]
    original = load(name, data_dir, offline)
    try:
        train, test = _read_grey(entry)
    except SourceFailed:
        fetch(name, data_dir, offline)  # checks every byte of the colour images
        original = load(name, data_dir, offline)
        with cache.locked(entry):
            train, test = _make_grey(entry, original)
    return Dataset(name, train, original.train_labels, test, original.test_labels)


def _make_grey(entry: CatalogEntry, found: Dataset) -> list[UInt8]:
    with contextlib.suppress(SourceFailed):
        return _read_grey(entry)  # another process made them while this one waited for the lock
    made = {path: grey28(getattr(found, key)) for key, path in _grey_paths(entry).items()}
    for path, images in made.items():
        cache.save(path, images)
    cache.write_json(cache.folder(entry) / GREY, {path.name: cache.sha256(images) for path, images in made.items()})
    return _read_grey(entry)


def _grey_paths(entry: CatalogEntry) -> dict[str, Path]:
    return {key: cache.folder(entry) / f"{key}_grey28.npy" for key in ("train_images", "test_images")}


def _read_grey(entry: CatalogEntry, intact: bool = False) -> list[UInt8]:
    """The cached grey images; with `intact`, their checksums are checked too."""
    noted = cache.read_json(cache.folder(entry) / GREY)
    read = []
    for key, path in _grey_paths(entry).items():
        images = cache.load(path, (entry.arrays[key].shape[0], 28, 28))
        if intact and cache.sha256(images) != noted.get(path.name):
            raise SourceFailed(f"{path} is damaged: its bytes changed after they were written")
        read.append(images)
    return read


def _intact(entry: CatalogEntry) -> dict[str, UInt8]:
    """The cached arrays, with every byte checked, including those of the grey images."""
    arrays = cache.read_intact(entry)
    _verify_grey(entry)
    return arrays


def _verify_grey(entry: CatalogEntry) -> None:
    """Check the bytes of the grey images, if there are any."""
    if (cache.folder(entry) / GREY).exists():
        _read_grey(entry, intact=True)


def _drop_grey(entry: CatalogEntry) -> None:
    (cache.folder(entry) / GREY).unlink(missing_ok=True)


def _dataset(entry: CatalogEntry, arrays: dict[str, UInt8]) -> Dataset:
    images, labels = arrays["train_images"], arrays["train_labels"]
    empty = {"test_images": images[:0], "test_labels": labels[:0]}
    return Dataset(entry.name, **{key: (empty | arrays)[key] for key in ARRAYS})


def _digests(images: UInt8) -> list[bytes]:
    return [hashlib.blake2b(image.tobytes(), digest_size=16).digest() for image in images]


def _check_folder(data_dir: Path | None) -> None:
    if data_dir is not None and not Path(data_dir).expanduser().is_dir():
        raise EvclError(f"there is no folder {data_dir}: pass one that holds the files, or leave it out")


def _offline(given: bool | None) -> bool:
    if given is not None:
        return given
    return os.environ.get("EVCL_OFFLINE", "").lower() not in ("", "0", "no", "false")
