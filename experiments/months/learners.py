"""The learners that the streams are given to: each learns one month after another, and predicts rows of any month.

`evcl` learns from files with the functions behind `evcl learn` and `evcl predict`, with their defaults. The learners of
scikit-learn get numbers scaled and categories in one-hot form, fitted on the first month: a category that it did not
have has no input of its own. Missing numbers become the mean, with an input that marks them. River's learners get each
row as it is, and gradient boosting gets categories as such.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

TARGET = "label"
Labels = NDArray[np.object_]


class About(NamedTuple):
    """What a learner is made from."""

    seed: int
    classes: list[str]  # all classes of the stream: scikit-learn's learners must know them beforehand
    folder: Path  # empty, for files
    suffix: str = ".csv"  # of the files


class Learner(Protocol):
    def learn(self, month: pd.DataFrame) -> None: ...

    def predict(self, rows: pd.DataFrame) -> Labels: ...


def columns(frame: pd.DataFrame) -> tuple[list[str], list[str]]:
    """The names of the numeric columns and of the others, without the label."""
    names = [name for name in frame.columns if name != TARGET]
    numeric = [name for name in names if pd.api.types.is_numeric_dtype(frame[name])]
    return numeric, [name for name in names if name not in numeric]


class Evcl:
    """`evcl learn` and `evcl predict`. `options` are those of the first `learn`."""

    def __init__(self, about: About, options: dict[str, Any]) -> None:
        self.place, self.suffix, self.months = about.folder, about.suffix, 0
        self.options = {"target": TARGET, "seed": about.seed, **options}

    def _written(self, frame: pd.DataFrame, name: str) -> Path:
        path = self.place / f"{name}{self.suffix}"
        if self.suffix == ".csv":
            frame.to_csv(path, index=False)
        else:
            frame.to_parquet(path, index=False)
        return path

    def learn(self, month: pd.DataFrame) -> None:
        from evcl import tables

        first = self.options if self.months == 0 else {}
        data = self._written(month, f"month {self.months}")
        tables.learn(self.place / "m.safetensors", data, **first)
        self.months += 1

    def predict(self, rows: pd.DataFrame) -> Labels:
        from evcl import tables

        data, out = self._written(rows.drop(columns=TARGET, errors="ignore"), "rows"), self.place / "out.csv"
        tables.predict(self.place / "m.safetensors", data, out)
        return np.asarray(pd.read_csv(out, dtype=str)["prediction"], dtype=object)


class Sklearn:
    """A learner of scikit-learn, by `partial_fit`: `passes` times over each month, shuffled anew."""

    def __init__(self, about: About, model: Any, passes: int) -> None:
        self.model, self.passes, self.classes = model, passes, about.classes
        self.source, self.encoder = np.random.default_rng(about.seed), None  # type: np.random.Generator, Any

    def _encoded(self, frame: pd.DataFrame) -> NDArray[np.float64]:
        from sklearn.compose import ColumnTransformer
        from sklearn.impute import SimpleImputer
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import OneHotEncoder, StandardScaler

        if self.encoder is None:
            numeric, others = columns(frame)
            scaled = make_pipeline(SimpleImputer(add_indicator=True), StandardScaler())
            hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
            self.encoder = ColumnTransformer([("numbers", scaled, numeric), ("texts", hot, others)]).fit(frame)
        return np.asarray(self.encoder.transform(frame))

    def learn(self, month: pd.DataFrame) -> None:
        x, y = self._encoded(month), month[TARGET].to_numpy()
        for _ in range(self.passes):
            order = self.source.permutation(len(x))
            self.model.partial_fit(x[order], y[order], classes=self.classes)

    def predict(self, rows: pd.DataFrame) -> Labels:
        return np.asarray(self.model.predict(self._encoded(rows)), dtype=object)


class River:
    """A learner of River, which learns row by row. A missing cell is left out of the row."""

    def __init__(self, about: About, model: Any) -> None:
        self.model, self.source = model, np.random.default_rng(about.seed)

    @staticmethod
    def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
        names = [name for name in frame.columns if name != TARGET]
        return [
            {name: value for name, value in zip(names, row, strict=True) if not pd.isna(value)}
            for row in frame[names].itertuples(index=False, name=None)
        ]

    def learn(self, month: pd.DataFrame) -> None:
        rows, labels = self._rows(month), month[TARGET].tolist()
        for i in self.source.permutation(len(rows)):
            self.model.learn_one(rows[i], labels[i])

    def predict(self, rows: pd.DataFrame) -> Labels:
        return np.array([self.model.predict_one(row) for row in self._rows(rows)], dtype=object)


class Boosting:
    """Gradient boosting on all months so far or on the last one, trained from the beginning each month."""

    def __init__(self, about: About, everything: bool) -> None:
        self.seed, self.everything, self.seen = about.seed, everything, pd.DataFrame()

    def _coded(self, frame: pd.DataFrame) -> pd.DataFrame:
        _, others = columns(self.seen)
        return frame.drop(columns=TARGET, errors="ignore").assign(
            **{name: pd.Categorical(frame[name], sorted(self.seen[name].dropna().unique())) for name in others}
        )

    def learn(self, month: pd.DataFrame) -> None:
        from sklearn.ensemble import HistGradientBoostingClassifier

        self.seen = pd.concat([self.seen, month], ignore_index=True) if self.everything else month
        self.model = HistGradientBoostingClassifier(random_state=self.seed, categorical_features="from_dtype")
        self.model.fit(self._coded(self.seen), self.seen[TARGET])

    def predict(self, rows: pd.DataFrame) -> Labels:
        return np.asarray(self.model.predict(self._coded(rows)), dtype=object)


def _sgd(about: About) -> Learner:
    from sklearn.linear_model import SGDClassifier

    return Sklearn(about, SGDClassifier(loss="log_loss", random_state=about.seed), passes=20)


def _naive_bayes(about: About) -> Learner:
    from sklearn.naive_bayes import GaussianNB

    return Sklearn(about, GaussianNB(), passes=1)


def _mlp(about: About) -> Learner:
    from sklearn.neural_network import MLPClassifier

    return Sklearn(about, MLPClassifier(random_state=about.seed), passes=50)


def _tree(about: About) -> Learner:
    from river.tree import HoeffdingTreeClassifier

    return River(about, HoeffdingTreeClassifier())


def _forest(about: About) -> Learner:
    from river.forest import ARFClassifier

    return River(about, ARFClassifier(seed=about.seed))


def _evcl(**options: Any) -> Callable[[About], Learner]:
    return lambda about: Evcl(about, options)


LEARNERS: dict[str, Callable[[About], Learner]] = {
    "evcl": _evcl(),
    "evcl --keep 200": _evcl(keep=200),
    "naive": _evcl(method="naive"),
    "vcl": _evcl(method="vcl"),
    "ewc": _evcl(method="ewc"),
    "SGDClassifier": _sgd,
    "GaussianNB": _naive_bayes,
    "MLPClassifier": _mlp,
    "Hoeffding tree": _tree,
    "adaptive random forest": _forest,
    "boosting, last month": lambda about: Boosting(about, everything=False),
    "boosting, everything": lambda about: Boosting(about, everything=True),
}


def accuracies(learner: Learner, months: Sequence[tuple[str, pd.DataFrame, pd.DataFrame]]) -> list[list[float]]:
    """R[i][j]: the accuracy on new rows of month j after learning month i."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn's on categories that the first month did not have
        for _, train, _ in months:
            learner.learn(train)
            found.append([float((learner.predict(test) == test[TARGET].to_numpy()).mean()) for _, _, test in months])
    return found
