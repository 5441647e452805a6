"""`evcl predict` for a model of `evcl stream`: each row of a file with its prediction beside it. Nothing is learned."""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist

import numpy as np
import torch

from evcl.streams.table import TableStream, load
from evcl.tables.asked import Predicting
from evcl.tables.commands import open_source
from evcl.tables.encoding import lacking
from evcl.tables.output_file import Column, check_ending
from evcl.tables.predicting import Batch, Predicted, Predictor, write_predictions
from evcl.tables.source import Kind, Piece, Values, absent, bad

NORMAL_975 = NormalDist().inv_cdf(0.975)


def predict_file(model: Path, data: Path, out: Path, asked: Predicting) -> Predicted:
    """Predict every row of a file with what the stream knows now, and write a CSV or Parquet file. Texts that it does
    not know, and columns that the file lacks, count as missing; with unknown="error", such a column is an error.
    """
    check_ending(out)
    return write_predictions(_OfStream(load(model), data, asked), model, out, asked)


class _OfStream(Predictor):
    def __init__(self, model: TableStream, data: Path, asked: Predicting) -> None:
        source, kinds = open_source(data, dialect=asked.dialect.also(model.missing)), model.encoder.kinds()
        super().__init__(source, model.target, model.kind, kinds, asked.drop)
        self.model = model
        _, new = model.encoder.check(source, (model.target, *model.drop, *asked.drop))
        gone = [name for name in kinds if name not in self.columns]
        if not self.columns or (gone and asked.unknown == "error"):
            bad(data, f"there is no column {lacking(gone, new)}")
        self.notes = absent(gone) if gone else []
        read: dict[str, Kind] = {**dict.fromkeys(source.shapes, "text"), **{name: kinds[name] for name in self.columns}}
        source.expect({**read, model.target: "text" if model.kind == "class" else "number"}, model.target)

    def predicted(self, piece: Piece, given: Values) -> Batch:
        rows = Piece({name: piece.columns[name] for name in self.columns}, piece.place, piece.rows)
        x = torch.from_numpy(self.model.encoder.encode(rows, self.source.path, learn=False))
        stream, kind = self.model.stream, self.model.kind
        if kind == "class":
            p = np.asarray(stream.predict_proba(x))
            entropy = -(p * np.log(np.maximum(p, 1e-300))).sum(1)
            classes = [self.model.labels[int(place)] for place in stream.classes]
            columns = {"prediction": Column(np.array(classes, dtype=object)[p.argmax(1)])}
            columns |= {f"probability_{label}": Column(p[:, i], 6) for i, label in enumerate(classes)}
            return Batch(piece, {**columns, "entropy": Column(entropy, 6)}, given, {"entropy": entropy})
        mean, std = map(np.asarray, stream.predictions(x))
        low = mean - NORMAL_975 * std
        measures = {
            "std": std,
            "low_95": np.maximum(low, 0.0) if kind == "count" else low,
            "high_95": mean + NORMAL_975 * std,
        }
        columns = {name: Column(values, 6) for name, values in {"prediction": mean, **measures}.items()}
        return Batch(piece, columns, given, measures, mean)
