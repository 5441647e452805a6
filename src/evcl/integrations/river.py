"""River: `evcl.Stream` as a classifier and as a regressor, for River's pipelines and its evaluation.

model = StandardScaler() | StreamClassifier()
evaluate.progressive_val_score(datasets.Phishing(), model, metrics.LogLoss())
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from evcl._core.errors import extra
from evcl.streams import Alarm, Numbers, Stream
from evcl.tables.encoding import Encoder
from evcl.tables.source import kind_of, piece_of

with extra("river", "evcl.integrations.river needs river"):
    import pandas as pd
    from river import base

__all__ = ["StreamClassifier", "StreamRegressor"]

L = TypeVar("L")
Features = dict[Any, Any]  # as River's own: names that can be keys, and values of any kind


class _Rows:
    """What both share: a stream, and the encoder of its rows, which are made when the first rows come.

    Features may be numbers, texts and dates (`datetime`); they may be missing, and new ones may come later.
    """

    likelihood = "categorical"

    def __init__(self, seed: int = 0, false_alarms: float = 1e-4, method: str = "ekf") -> None:
        self.seed, self.false_alarms, self.method = seed, false_alarms, method
        self._stream = Stream(likelihood=self.likelihood, seed=seed, false_alarms=false_alarms, method=method)
        self._encoder: Encoder | None = None

    @property
    def alarms(self) -> list[Alarm]:
        """The changes that were noticed. Their `columns` are names of features, such as "wind" or "sky=clear"."""
        if self._encoder is None:
            return []
        names: Sequence[Any] = self._encoder.inputs_of
        return [one._replace(columns=tuple(names[place] for place in one.columns)) for one in self._stream.alarms]

    def _inputs(self, rows: Sequence[Features], learn: bool) -> torch.Tensor:
        piece, path = piece_of(rows), Path("x")
        if self._encoder is None:
            kinds = {name: kind_of(values) for name, values in piece.columns.items()}
            made = Encoder.for_rows(kinds or {"nothing": "number"})
            if not learn:
                return torch.from_numpy(made.encode(piece, path))
            self._encoder = made
        return torch.from_numpy(self._encoder.encode(piece, path, learn))

    @staticmethod
    def _rows(frame: pd.DataFrame) -> list[Features]:
        """The rows of a frame; NaN is missing."""
        rows: list[Features] = frame.to_dict("records")
        return [{name: None if pd.isna(value) else value for name, value in row.items()} for row in rows]

    @staticmethod
    def _labelled(rows: Sequence[Features], labels: Sequence[L]) -> tuple[list[Features], list[L]]:
        """The rows that have a label; others are passed over."""
        labelled = [(row, label) for row, label in zip(rows, labels, strict=True) if not pd.isna(label)]
        return [row for row, _ in labelled], [label for _, label in labelled]


class StreamClassifier(_Rows, base.MiniBatchClassifier):
    """A classifier for River that says how sure it is, and when what it learned no longer holds (`alarms`).

    Args:
        seed: the seed of the default network
        false_alarms: false alarms per row, on average at most
        method: `ekf` or `mesu`; see `evcl.streams.SETTINGS`
    """

    def __init__(self, seed: int = 0, false_alarms: float = 1e-4, method: str = "ekf") -> None:
        super().__init__(seed, false_alarms, method)
        self._labels: dict[Hashable, int] = {}

    @property
    def _multiclass(self) -> bool:
        return True

    def learn_one(self, x: Features, y: Hashable) -> None:
        """Learn one row. Without a label (None or NaN), it is passed over."""
        self._learn([x], [y])

    def learn_many(self, X: pd.DataFrame, y: pd.Series) -> None:  # noqa: N803  (River's name)
        """Learn the rows of a frame that have a label."""
        self._learn(self._rows(X), y.tolist())

    def predict_proba_one(self, x: Features, **kwargs: object) -> dict[Hashable, float]:
        """The probability of each label known so far; empty before the first row."""
        if not self._labels:
            return {}
        p = self._stream.predict_proba(self._inputs([x], learn=False))[0].tolist()
        return dict(zip(self._known(), p, strict=True))

    def predict_proba_many(self, X: pd.DataFrame) -> pd.DataFrame:  # noqa: N803  (River's name)
        """The probability of each label known so far, a column each."""
        if not self._labels or not len(X):
            return pd.DataFrame(index=X.index)
        p = self._stream.predict_proba(self._inputs(self._rows(X), learn=False))
        return pd.DataFrame(p.numpy(), index=X.index, columns=self._known())

    def _known(self) -> list[Hashable]:
        labels = list(self._labels)
        return [labels[int(place)] for place in self._stream.classes]

    def _learn(self, rows: Sequence[Features], labels: Sequence[Hashable]) -> None:
        rows, labels = self._labelled(rows, labels)
        for label in labels:
            self._labels.setdefault(label, len(self._labels))
        if rows:
            self._stream.learn(self._inputs(rows, learn=True), [self._labels[label] for label in labels])


class StreamRegressor(_Rows, base.MiniBatchRegressor):
    """A regressor for River. `predict_std_one` says how far the target may be from the prediction.

    Args:
        seed: the seed of the default network
        false_alarms: false alarms per row, on average at most
        method: `ekf` or `mesu`; see `evcl.streams.SETTINGS`
    """

    likelihood = "gaussian"

    def learn_one(self, x: Features, y: float) -> None:
        """Learn one row. Without a label (None or NaN), it is passed over."""
        self._learn([x], [y])

    def learn_many(self, X: pd.DataFrame, y: pd.Series) -> None:  # noqa: N803  (River's name)
        """Learn the rows of a frame that have a label."""
        self._learn(self._rows(X), y.tolist())

    def predict_one(self, x: Features) -> float:
        """The expected value; 0 before the first row."""
        return float(self._predicted([x]).mean[0]) if self._encoder is not None else 0.0

    def predict_std_one(self, x: Features) -> float:
        """The standard deviation of the target around the prediction; 1 before the first row."""
        return float(self._predicted([x]).std[0]) if self._encoder is not None else 1.0

    def predict_many(self, X: pd.DataFrame) -> pd.Series:  # noqa: N803  (River's name)
        """The expected values."""
        known = self._encoder is not None and len(X)
        values = self._predicted(self._rows(X)).mean.numpy() if known else np.zeros(len(X))
        return pd.Series(values, index=X.index, name="prediction")

    def _predicted(self, rows: Sequence[Features]) -> Numbers:
        return self._stream.predictions(self._inputs(rows, learn=False))

    def _learn(self, rows: Sequence[Features], targets: Sequence[float]) -> None:
        rows, targets = self._labelled(rows, targets)
        if rows:
            self._stream.learn(self._inputs(rows, learn=True), np.array(targets, dtype=np.float64))
