"""Regression with the defaults: errors, and how many new rows the 95% intervals contain.

    python experiments/numbers/intervals.py [diabetes] [housing] [series] [--rows N] [--seeds 3] [--housing FILE]

diabetes and housing: 10 folds. scikit-learn downloads California housing; without a connection, `--housing` names a
file housing.csv with the same districts (that of A. Geron's book), whose rows with empty cells are left out.
series: 11 blocks of 200 rows whose rule, level and noise drift; each block is learned after it was predicted, so there
are 10 folds. Beside EVCL, scikit-learn's MLPRegressor, with scaled targets, and BayesianRidge. In the series,
MLPRegressor learns each block with 50 calls of partial_fit; BayesianRidge is fitted to all rows so far, and again to
the last block alone.

Nothing was tuned on diabetes and housing. The rule for targets that drift was developed on this generator of series,
with seeds 0, 1 and 100; the series measured here have seeds from 200 on.
"""

from __future__ import annotations

import argparse
import csv
import warnings
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import fetch_california_housing, load_diabetes
from sklearn.linear_model import BayesianRidge
from sklearn.model_selection import KFold
from sklearn.neural_network import MLPRegressor

import evcl

Z = 1.959964
BLOCKS, ROWS = 11, 200


def housing(path: str | None) -> tuple[np.ndarray, np.ndarray]:
    """California housing: the eight numeric columns, and the median house value of a district in dollars."""
    if path is None:
        found = fetch_california_housing()
        return found.data, 100_000 * found.target
    with Path(path).open() as file:
        rows = [row for row in csv.DictReader(file) if all(row.values())]
    each = {name: np.array([float(row[name]) for row in rows]) for name in rows[0] if name != "ocean_proximity"}
    homes, y = each.pop("households"), each.pop("median_house_value")
    each |= {name: each[name] / homes for name in ("total_rooms", "total_bedrooms")}  # as scikit-learn has them
    each["occupation"] = each["population"] / homes
    return np.stack(list(each.values()), 1), y


FIRST_SERIES = 200


def series(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows in time order: a rule that turns, a level that wanders, noise that doubles, one part that is not linear."""
    rng = np.random.default_rng(seed)
    n = BLOCKS * ROWS
    t = np.arange(n) / n
    x = rng.normal(size=(n, 6))
    angle = 2 * np.pi * t
    level = np.cumsum(rng.normal(size=n)) * 0.05
    y = 3 * np.cos(angle) * x[:, 0] + 3 * np.sin(angle) * x[:, 1] + 2 * np.sin(2 * x[:, 2]) + level
    return x, 50 + 10 * (y + (1 + t) * rng.normal(size=n))


class Score:
    """Squared errors and covered rows, pooled over folds."""

    def __init__(self) -> None:
        self.errors: list[np.ndarray] = []
        self.inside: list[np.ndarray] = []

    def add(self, y: np.ndarray, mean: np.ndarray, std: np.ndarray | None = None) -> None:
        self.errors.append((y - mean) ** 2)
        if std is not None:
            self.inside.append(np.abs(y - mean) <= Z * std)

    def __str__(self) -> str:
        text = f"{np.sqrt(np.concatenate(self.errors).mean()):.5g}"
        return f"{text} ({100 * np.concatenate(self.inside).mean():.1f}%)" if self.inside else text


def scaled(train: np.ndarray, *others: np.ndarray) -> list[np.ndarray]:
    mean, std = train.mean(0), train.std(0)
    return [((one - mean) / std).astype("float32") for one in (train, *others)]


def learner(columns: int, seed: int) -> evcl.Learner:
    return evcl.EVCL(evcl.nn.mlp(columns, [100]), likelihood="gaussian", seed=seed)


def folds(x: np.ndarray, y: np.ndarray, seed: int) -> dict[str, Score]:
    scores = {name: Score() for name in ("EVCL", "MLPRegressor", "BayesianRidge")}
    for train, test in KFold(10, shuffle=True, random_state=seed).split(x):
        a, b = scaled(x[train], x[test])
        model = learner(x.shape[1], seed)
        model.learn((a, y[train]))
        found = model.predictions(b)
        scores["EVCL"].add(y[test], found.mean, found.std)
        m, s = y[train].mean(), y[train].std()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it may not converge in 200 epochs, its default
            plain = MLPRegressor(random_state=seed).fit(a, (y[train] - m) / s)
        scores["MLPRegressor"].add(y[test], m + s * plain.predict(b))
        scores["BayesianRidge"].add(y[test], *BayesianRidge().fit(a, y[train]).predict(b, return_std=True))
    return scores


def blocks(x: np.ndarray, y: np.ndarray, seed: int) -> dict[str, Score]:
    scores = {name: Score() for name in ("EVCL", "MLPRegressor", "BayesianRidge", "BayesianRidge, last block")}
    (x,) = scaled(x)
    m, s = y[:ROWS].mean(), y[:ROWS].std()
    model, plain = learner(x.shape[1], seed), MLPRegressor(random_state=seed)
    for k in range(BLOCKS - 1):
        now, then = slice(k * ROWS, (k + 1) * ROWS), slice((k + 1) * ROWS, (k + 2) * ROWS)
        model.learn((x[now], y[now]), str(k), head="0" if k else "new")
        found = model.predictions(x[then])
        scores["EVCL"].add(y[then], found.mean, found.std)
        for _ in range(50):
            plain.partial_fit(x[now], (y[now] - m) / s)
        scores["MLPRegressor"].add(y[then], m + s * plain.predict(x[then]))
        before = slice(0, (k + 1) * ROWS)
        for name, rows in (("BayesianRidge", before), ("BayesianRidge, last block", now)):
            scores[name].add(y[then], *BayesianRidge().fit(x[rows], y[rows]).predict(x[then], return_std=True))
    return scores


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="*", default=["diabetes", "housing", "series"])
    parser.add_argument("--rows", type=int, help="use this many random rows of diabetes and housing")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--housing", help="a table of California housing to read instead of downloading it")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.data:
        for seed in range(given.seeds):
            if name == "series":
                scores = blocks(*series(FIRST_SERIES + seed), seed)
            else:
                x, y = load_diabetes(return_X_y=True) if name == "diabetes" else housing(given.housing)
                rows = np.random.default_rng(seed).permutation(len(y))[: given.rows]
                scores = folds(x[rows], y[rows], seed)
            print(f"{name}, seed {seed}: " + "; ".join(f"{key} {score}" for key, score in scores.items()), flush=True)


if __name__ == "__main__":
    main()
