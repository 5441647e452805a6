"""Small data sets in every real format, and catalogue entries for them. Run as a script, it fetches one."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import sys
import tarfile
from pathlib import Path

import numpy as np

from evcl import data
from evcl.data.catalog import ARRAYS, CATALOG, Array, CatalogEntry, File, Form, Package

IDX = tuple(
    f"{name}-ubyte" for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
)
BATCHES = ("data_batch_1", "data_batch_2", "test_batch")
FORMS = {
    "idx": Form("idx", IDX, ("tiny-1.0.0.tgz",)),
    "cifar": Form("cifar", tuple(f"{name}.bin" for name in BATCHES), ("tiny-binary.tar.gz", "tiny-binary.tar")),
    "sheets": Form(
        "sheets", (*(f"{name}.png" for name in BATCHES), "train_lables.json", "test_lables.json"), ("tiny-2.0.0.tgz",)
    ),
    "letters": Form("letters", ("A", "B", "C"), ("letters.tar.gz", "letters.tar")),
    "npz": Form("npz", ("tiny.npz",), keys=("x_train", "y_train", "x_test", "y_test")),
}


def arrays(kind: str = "idx", seed: int = 0, size: int = 6) -> dict[str, np.ndarray]:
    """Random images, 2 x `size` to train on and `size` to test on; letters come in order and without a test set."""
    source = np.random.default_rng(seed)
    shape = {"cifar": (32, 32, 3), "sheets": (32, 32, 3), "letters": (28, 28)}.get(kind, (5, 4))
    counts = {"train": 2 * size, "test": size}
    made = {}
    for part, count in counts.items():
        made[f"{part}_images"] = source.integers(0, 256, (count, *shape), dtype=np.uint8)
        made[f"{part}_labels"] = source.integers(0, 3, count, dtype=np.uint8)
    if kind == "letters":
        return {"train_images": made["train_images"], "train_labels": np.sort(made["train_labels"])}
    return made


def entry(found: dict[str, np.ndarray], files: dict[str, bytes] | None = None, **changes: object) -> CatalogEntry:
    """A catalogue entry for these arrays and web files, named tiny."""
    fields = {
        "name": "tiny",
        "summary": "made up",
        "licence": "none",
        "citation": "nobody",
        "arrays": {key: Array(value.shape, sha256(value.tobytes())) for key, value in found.items()},
        "files": tuple(File(name, len(body), sha256(body)) for name, body in (files or {}).items()),
        "mirrors": (),
        "forms": tuple(FORMS.values()),
        "folders": ("tiny", "TINY/raw", ""),
        "most_bytes": 2**20,
    }
    return CatalogEntry(**(fields | changes))  # type: ignore[arg-type]


def npm(form: str = "idx") -> Package:
    return Package("npm", "tiny", FORMS[form], "1.0.0")


def apt() -> Package:
    return Package("apt", "dataset-tiny", FORMS["idx"])


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


# The formats, written


def idx(found: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {
        name: bytes([0, 0, 8, found[key].ndim])
        + struct.pack(f">{found[key].ndim}I", *found[key].shape)
        + found[key].tobytes()
        for name, key in zip(IDX, ARRAYS, strict=True)
    }


def gzipped(files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{name}.gz": gzip.compress(body, mtime=0) for name, body in files.items()}


def _batches(found: dict[str, np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    half = len(found["train_labels"]) // 2
    train = [(found["train_images"][rows], found["train_labels"][rows]) for rows in (slice(0, half), slice(half, None))]
    return [*train, (found["test_images"], found["test_labels"])]


def cifar(found: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {
        f"{name}.bin": b"".join(
            bytes([y]) + x.transpose(2, 0, 1).tobytes() for x, y in zip(images, labels, strict=True)
        )
        for name, (images, labels) in zip(BATCHES, _batches(found), strict=True)
    }


def sheets(found: dict[str, np.ndarray]) -> dict[str, bytes]:
    pages = {
        f"{name}.png": png(x.reshape(len(x), 1024, 3)) for name, (x, _) in zip(BATCHES, _batches(found), strict=True)
    }
    labels = {
        f"{part}_lables.json": json.dumps(found[f"{part}_labels"].tolist()).encode() for part in ("train", "test")
    }
    return pages | labels


def letters(found: dict[str, np.ndarray]) -> dict[str, bytes]:
    """In the order of the arrays by name, plus an empty and a broken file, as notMNIST has them."""
    files = {
        f"{'ABC'[label]}/{index:03d}=.png": png(image)
        for index, (image, label) in enumerate(zip(found["train_images"], found["train_labels"], strict=True))
    }
    return files | {"A/000a.png": b"", "B/zzz.png": b"\x89PNG broken"}


def npz(found: dict[str, np.ndarray]) -> dict[str, bytes]:
    out = io.BytesIO()
    np.savez_compressed(out, **{key: found[name] for key, name in zip(FORMS["npz"].keys, found, strict=False)})
    return {"tiny.npz": out.getvalue()}


def png(image: np.ndarray) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    return out.getvalue()


def tar(files: dict[str, bytes], extra: list[tarfile.TarInfo] | None = None, mode: str = "w:gz") -> bytes:
    """An archive; `extra` members (links, devices) come first."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        for member in extra or []:
            archive.addfile(member)
        for name, body in reversed(files.items()):
            member = tarfile.TarInfo(name)
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
    return out.getvalue()


def put(folder: Path, files: dict[str, bytes]) -> Path:
    for name, body in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(body)
    return folder


def web(seed: int = 0, size: int = 6) -> tuple[dict[str, np.ndarray], dict[str, bytes]]:
    """Arrays, and the files that a mirror holds of them."""
    found = arrays("idx", seed, size)
    return found, gzipped(idx(found))


if __name__ == "__main__":
    CATALOG.add("tiny", entry(*web(), mirrors=(sys.argv[1],)))
    data.fetch("tiny")
