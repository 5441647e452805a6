"""What every model of a table says of itself in its file, whether it learns tasks or a stream.

The file is that of the learner or the stream, which `evcl.load` or `evcl.Stream.load` reads too, with a second text in
its metadata, under one name for each kind of model, and further tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.files import open_tensors
from evcl.learner.persist import opened, reading
from evcl.tables.encoding import Encoder
from evcl.tables.source import Json


@dataclass
class OfTable:
    """What a model knows of the files that it learns."""

    encoder: Encoder
    target: str | None  # None: the folder of an image
    labels: list[str] = field(default_factory=list)  # what learns uses places in this list as labels
    drop: tuple[str, ...] = ()  # columns to ignore in every file
    missing: tuple[str, ...] = ()  # texts and numbers that mean a missing value in every file, beside the usual ones

    def described(self) -> Json:
        """All but the encoder, for JSON."""
        return {"target": self.target, "labels": self.labels, "drop": self.drop, "missing": self.missing}


def described_in(saved: Json) -> dict[str, Any]:
    """The inverse of `described`, as arguments. Files of earlier versions do not say what is missing."""
    target, missing = saved["target"], tuple(saved.get("missing", ()))
    labels, drop = tuple(saved["labels"]), tuple(saved["drop"])
    texts = [*labels, *drop, *missing, *([] if target is None else [target])]
    if not all(isinstance(text, str) for text in texts) or len(set(labels)) != len(labels):
        raise EvclError("its labels and columns should be text, and no label is there twice")
    return {"target": target, "labels": list(labels), "drop": drop, "missing": missing}


@dataclass(frozen=True)
class Note:
    """The text in the metadata of one kind of model: its name, the formats that are read, of which the last one is
    written, where the names of its tensors begin, and what reads its files without the text.
    """

    name: str
    formats: tuple[int, ...]
    prefix: str
    loader: str

    @contextmanager
    def opened(self, path: Path) -> Iterator[tuple[Json, dict[str, Tensor]]]:
        """The text of a file, and its tensors. Inside this context, whatever is wrong is reported in one line."""
        with opened(path, self.name) as (saved, file):
            if saved is None:
                raise EvclError(f"it was saved from Python and does not say how to encode a table: use {self.loader}")
            if saved["format"] not in self.formats:
                known = f"but this version of evcl reads only {' and '.join(map(str, self.formats))}"
                raise EvclError(f"its table has format {saved['format']!r}, {known}")
            names = [name for name in file.keys() if name.startswith(self.prefix)]  # noqa: SIM118  (it is no dict)
            yield saved, {name: file.get_tensor(name) for name in names}


def notes_of(path: Path) -> Mapping[str, str]:
    """The texts in the metadata of a model file."""
    with reading(path), open_tensors(path) as file:
        return file.metadata() or {}
