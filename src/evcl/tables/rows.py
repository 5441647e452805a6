"""The labels of a file's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evcl._core.bounds import MOST_CLASSES
from evcl._core.inputs import positions
from evcl.tables.fitting import EncoderFitting
from evcl.tables.image_folder import FOLDER
from evcl.tables.source import Source, bad
from evcl.tables.values import labels_of, same_truth


@dataclass
class Rows:
    """The labels of a file's rows."""

    names: list[str]  # the distinct labels
    codes: list[int]  # per row, the index of its label in `names`

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
    for piece in source.pieces([own] if fitting is None else [*fitting.names, own]):
        if fitting is not None:
            fitting.see(piece)
        for row, label in enumerate(labels_of(source, piece, own)):
            if label is None:
                what = "the image is not in the folder of a class" if source.images else "the label is missing"
                if text := piece.cells[own][row] if own in piece.cells else "":
                    what += f": {text!r} means a missing value; if it is a class here, write it in another way"
                bad(source.path, piece.place(row), what)
            codes.append(place.setdefault(label, len(place)))
        if len(place) > MOST_CLASSES:
            fix = "" if source.images else "; --kind number or --kind count learns a number"
            what = f"more than {MOST_CLASSES:,} different labels are too many classes{fix}"
            bad(source.path, f"column {own!r}", what)
    if not codes:
        bad(source.path, "it holds no rows")
    same = same_truth(list(place), known)
    names = list(dict.fromkeys(same.get(name, name) for name in place))
    if len(names) < len(place):
        merged = [names.index(same.get(name, name)) for name in place]
        codes = [merged[code] for code in codes]
    return Rows(names, codes)
