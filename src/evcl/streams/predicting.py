"""`evcl predict` for a model of `evcl stream`: each row of a file with its prediction beside it. Nothing is learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch

from evcl._core.errors import BadExample, EvclError
from evcl._core.files import write_atomically
from evcl.streams.table import TableStream, load
from evcl.tables.commands import open_source
from evcl.tables.output_file import STANDARD, Column, check_ending, writing
from evcl.tables.predicting import Predicted
from evcl.tables.rows import present, targets_of
from evcl.tables.source import Dialect, Kind, Piece, Source, Unknown, absent, bad, listed

WIDE = NormalDist().inv_cdf(0.975)


def predict_file(
    model: Path,
    data: Path,
    out: Path,
    *,
    drop: Sequence[str] = (),
    unknown: Unknown = "missing",
    dialect: Dialect | None = None,
    keys: Sequence[str] | None = None,
) -> Predicted:
    """Predict every row of a file with what the stream knows now, and write a CSV or Parquet file. Texts that it does
    not know, and columns that the file lacks, count as missing; with unknown="error", such a column is an error.
    """
    check_ending(out)
    found, dialect = load(model), dialect or Dialect()
    missing = tuple(dict.fromkeys((*found.missing, *dialect.missing)))
    source = open_source(data, dialect=replace(dialect, missing=missing))
    names = [name for name in found.encoder.columns if name in source.shapes and name not in drop]
    if not names:
        wanted = listed([repr(name) for name in found.encoder.columns])
        bad(data, f"there is no column {wanted}, which the model learned from")
    for other in (model, data):
        if out != STANDARD and out.exists() and other.exists() and out.samefile(other):
            raise EvclError(f"--out {out} would overwrite a file that is read")
    for name in keys or ():
        if source.shapes.get(name) != ():
            bad(data, f"there is no column {name!r} to use as a key")
    labelled = found.target in source.shapes
    kinds: dict[str, Kind] = dict.fromkeys(source.shapes, "text")  # others are written as they are
    kinds |= {name: found.encoder.columns[name].kind for name in names}
    source.expect({**kinds, found.target: "text" if found.kind == "class" else "number"}, found.target)
    beside = [name for name, shape in source.shapes.items() if shape == () and (keys is None or name in keys)]
    total = Predicted()
    gone = [name for name in found.encoder.columns if name not in names]
    if gone and unknown == "error":
        bad(data, f"there is no column {listed([repr(name) for name in gone])}, which the model learned from")
    total.notes = absent(gone) if gone else []

    def write(into: Path) -> None:
        with writing(out, into) as writer:
            read = {*names, *beside, *([found.target] if labelled else [])}
            for piece in source.pieces(read):
                columns = {name: piece.columns[name] for name in names}
                x = torch.from_numpy(found.encoder.encode(columns, piece, data, learn=False))
                try:
                    ours = _columns(found, x, total)
                except BadExample as error:
                    bad(data, piece.place(error.row), error.what)
                if twice := [name for name in beside if name in ours]:
                    fix = "--key chooses columns, --only-predictions leaves all out"
                    bad(data, f"it has a column {twice[0]!r}, and so have the predictions; {fix}")
                number = {name for name in names if found.encoder.columns[name].kind == "number"}
                own = {name: Column(source.written(piece, name), number=name in number) for name in beside}
                writer.write({**own, **ours})
                if labelled:
                    _compare(found, source, piece, ours, total)

    write(out) if out == STANDARD else write_atomically(out, write)
    if not total.rows:
        bad(data, "it holds no rows")
    total.read = [] if source.told is None else [source.told]
    total.end()
    return total


def _columns(model: TableStream, x: torch.Tensor, total: Predicted) -> Mapping[str, Column]:
    """The columns of the predictions of some rows, which are counted."""
    total.rows += len(x)
    if model.kind == "class":
        p = np.asarray(model.stream.predict_proba(x))
        entropy = -(p * np.log(np.maximum(p, 1e-300))).sum(1)
        total.entropy += float(entropy.sum())
        classes = [model.labels[int(place)] for place in model.stream.classes]
        found = {"prediction": Column(np.array(classes, dtype=object)[p.argmax(1)])}
        found |= {f"probability_{label}": Column(p[:, i], 6) for i, label in enumerate(classes)}
        return {**found, "entropy": Column(entropy, 6)}
    numbers = model.stream.predictions(x)
    mean, std = np.asarray(numbers.mean), np.asarray(numbers.std)
    total.std = (total.std or 0.0) + float(std.sum())
    ends = {"low_95": mean - WIDE * std, "high_95": mean + WIDE * std}
    if model.kind == "count":
        ends["low_95"] = np.maximum(ends["low_95"], 0.0)
    return {name: Column(values, 6) for name, values in {"prediction": mean, "std": std, **ends}.items()}


def _compare(model: TableStream, source: Source, piece: Piece, ours: Mapping[str, Column], total: Predicted) -> None:
    """Count how many predictions are right, where the file has the target."""
    said: Any = ours["prediction"].values
    true = targets_of(source, piece, model.target, model.kind)
    there = present(true)
    total.labelled += int(there.sum())
    if model.kind == "class":
        total.right += int((said == true).sum())
        return
    total.squares += float(np.square(true - said)[there].sum())
    low, high = (np.asarray(ours[name].values) for name in ("low_95", "high_95"))
    total.inside += int(((low <= true) & (true <= high)).sum())
