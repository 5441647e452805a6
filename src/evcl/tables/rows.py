"""The labels of a file's rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from evcl._core.bounds import MOST_CLASSES
from evcl._core.inputs import positions
from evcl.tables.fitting import EncoderFitting
from evcl.tables.image_folder import FOLDER
from evcl.tables.source import Bools, Piece, Source, bad, plural
from evcl.tables.values import labels_of, same_truth


class Labelled:
    """Which rows of a file have a label. The others are left out."""

    def __init__(self) -> None:
        self._parts: list[Bools] = []
        self._why = ""  # what stands in the place of the first missing label

    def see(self, piece: Piece, there: Bools, target: str) -> Piece:
        """The rows of the next piece that have a label: those for which `there` [rows] is True."""
        self._parts.append(there)
        if not self._why and not there.all() and target in piece.cells:
            row = int(np.argmin(there))
            if text := piece.cells[target][row]:
                fix = "means a missing value; if it is a class here, write it in another way"
                self._why = f" ({piece.place(row)}: {text!r} {fix})"
        return piece.select(there)

    def pieces(self, source: Source, names: Collection[str]) -> Iterator[Piece]:
        """The file once more, without the rows that are left out."""
        there, start = np.concatenate(self._parts), 0
        for piece in source.pieces(names):
            mine = there[start : start + piece.rows]
            if len(mine) != piece.rows:
                bad(source.path, "it grew while it was being read")
            start += piece.rows
            if mine.any():
                yield piece.select(mine)
        if start != len(there):
            bad(source.path, "it shrank while it was being read")

    @property
    def note(self) -> str:
        """What to say of the rows that are left out; empty if there are none."""
        count = sum(int((~part).sum()) for part in self._parts)
        verb = "is" if count == 1 else "are"
        return f"{plural(count, 'row')} without a label {verb} left out{self._why}" if count else ""

    def check(self, source: Source, target: str) -> None:
        """Raise if no row is left."""
        if not sum(map(len, self._parts)):
            bad(source.path, "it holds no rows")
        if not any(part.any() for part in self._parts):
            bad(source.path, f"column {target!r}", f"every label is missing{self._why}; choose another --target")


@dataclass
class Rows:
    """The labels of a file's rows."""

    names: list[str]  # the distinct labels
    codes: list[int]  # per row that has a label, its index in `names`
    labelled: Labelled

    def numbers(self, labels: Sequence[str]) -> Tensor:
        return positions(self.names, labels)[torch.tensor(self.codes)]


def read_rows(
    source: Source, target: str | None, fitting: EncoderFitting | None = None, known: Sequence[str] = ()
) -> Rows:
    """Read a file's labels in one pass and, for the first task, fit the encoder in the same pass. `known`: the labels
    learned so far.
    """
    own = FOLDER if source.images else str(target)
    if not source.images and own not in source.shapes:
        bad(
            source.path,
            f"there is no column {own!r}, the target; it has {', '.join(map(repr, list(source.shapes)[:8]))}",
        )
    place: dict[str, int] = {}
    codes: list[int] = []
    labelled = Labelled()
    for piece in source.pieces([own] if fitting is None else [*fitting.names, own]):
        labels = labels_of(source, piece, own)
        there = np.array([label is not None for label in labels], dtype=bool)
        if source.images and not there.all():
            bad(source.path, piece.place(int(np.argmin(there))), "the image is not in the folder of a class")
        kept = labelled.see(piece, there, own)
        if fitting is not None and kept.rows:
            fitting.see(kept)
        codes += [place.setdefault(label, len(place)) for label in labels if label is not None]
        if len(place) > MOST_CLASSES:
            fix = "" if source.images else "; --kind number or --kind count learns a number"
            what = f"more than {MOST_CLASSES:,} different labels are too many classes{fix}"
            bad(source.path, f"column {own!r}", what)
    labelled.check(source, own)
    same = same_truth(list(place), known)
    names = list(dict.fromkeys(same.get(name, name) for name in place))
    if len(names) < len(place):
        merged = [names.index(same.get(name, name)) for name in place]
        codes = [merged[code] for code in codes]
    return Rows(names, codes, labelled)
