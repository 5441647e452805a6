"""The learners that are compared: one interface, their defaults, and the eight settings that a search tries for each.

A learner gets rows in order, predicts each row before it learns it, and is told the number of classes beforehand. All
learn row by row, except evcl, which learns 16 rows at a time: it predicts all of them before it learns any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from evcl.streams.evaluation import size_of

Floats = NDArray[np.float64]


class Peer(Protocol):
    """A learner of a stream."""

    def step(self, x: Tensor, y: Tensor) -> Floats:
        """Probabilities [n, classes] for rows [n, inputs], each predicted before it is learned."""
        ...


class RiverPeer:
    """One of River's classifiers, fed row by row. What it says is divided by its sum; if it says nothing, all classes
    are equally likely.
    """

    def __init__(self, model: Any, classes: int) -> None:
        self.model, self.classes = model, classes
        self.binary = type(model).__name__ == "LogisticRegression" or _last(model) == "LogisticRegression"

    def step(self, x: Tensor, y: Tensor) -> Floats:
        found = np.zeros((len(y), self.classes))
        for i, (values, label) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
            row = dict(enumerate(values))
            for place, p in self.model.predict_proba_one(row).items():
                found[i, int(place)] = p
            self.model.learn_one(row, bool(label) if self.binary else label)
        found = np.nan_to_num(found)
        whole = found.sum(1, keepdims=True)
        return np.where(whole > 0, found / np.where(whole > 0, whole, 1), 1 / self.classes)


def _last(model: Any) -> str:
    """The class name of a pipeline's last step."""
    steps = getattr(model, "steps", None)
    return type(list(steps.values())[-1]).__name__ if steps else ""


class ReplayPeer:
    """A network with one hidden layer of ReLUs, trained by Adam, with replay. Inputs are standardised by the mean and
    deviation of the rows so far. For each row it makes one step, on that row and `replay` rows drawn from a reservoir,
    which holds `reservoir` rows that are a uniform sample of all rows so far; with `recent`, the latest ones.
    """

    def __init__(
        self, inputs: int, classes: int, seed: int, lr: float = 1e-3, hidden: int = 64, replay: int = 15,
        reservoir: int = 1000, recent: bool = False,
    ) -> None:  # fmt: skip
        self.source = np.random.default_rng(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=lr)
        self.replay, self.recent, self.rows = replay, recent, 0
        self.kept_x, self.kept_y = torch.zeros(reservoir, inputs), torch.zeros(reservoir, dtype=torch.long)
        self.mean, self.squares = torch.zeros(inputs, dtype=torch.float64), torch.zeros(inputs, dtype=torch.float64)

    def scaled(self, x: Tensor) -> Tensor:
        deviation = (self.squares / max(self.rows, 1)).sqrt()
        return ((x - self.mean) / torch.where(deviation > 0, deviation, 1.0)).float()

    def step(self, x: Tensor, y: Tensor) -> Floats:
        return np.concatenate([self._row(x[i : i + 1], y[i : i + 1]) for i in range(len(y))])

    def _row(self, x: Tensor, y: Tensor) -> Floats:
        with torch.no_grad():
            found: Floats = self.network(self.scaled(x)).double().softmax(1).numpy()
        self.rows += 1
        delta = x[0].double() - self.mean
        self.mean += delta / self.rows
        self.squares += delta * (x[0].double() - self.mean)
        size = len(self.kept_y)
        have = min(self.rows - 1, size)
        drawn = torch.from_numpy(self.source.integers(0, have, self.replay if have else 0))
        inputs = self.scaled(torch.cat([x, self.kept_x[drawn]]))
        loss = nn.functional.cross_entropy(self.network(inputs), torch.cat([y, self.kept_y[drawn]]))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        place = (self.rows - 1) % size if self.recent or have < size else int(self.source.integers(0, self.rows))
        if place < size:
            self.kept_x[place], self.kept_y[place] = x[0], y[0]
        return found


class StreamPeer:
    """`evcl.Stream`, fed `batch` rows at a time: all of them are predicted before any is learned. The first batches are
    smaller, as in `evcl run`.
    """

    def __init__(self, classes: int, seed: int, batch: int, **settings: Any) -> None:
        import evcl

        self.stream = evcl.Stream(classes=range(classes), seed=seed, **settings)
        self.batch = batch

    def step(self, x: Tensor, y: Tensor) -> Floats:
        parts, start = [], 0
        while start < len(y):
            end = start + size_of(self.batch, self.stream.rows)
            parts.append(np.asarray(self.stream.step(x[start:end], y[start:end])[0], dtype=np.float64))
            start = end
        return np.concatenate(parts)


Make = Callable[..., Peer]  # make(inputs, classes, seed, **settings)


def _hat(inputs: int, classes: int, seed: int, **settings: Any) -> Peer:
    from river import tree

    return RiverPeer(tree.HoeffdingAdaptiveTreeClassifier(seed=seed, **settings), classes)


def _arf(inputs: int, classes: int, seed: int, **settings: Any) -> Peer:
    from river import forest

    return RiverPeer(forest.ARFClassifier(seed=seed, **settings), classes)


def _logistic(inputs: int, classes: int, seed: int, optimizer: str = "SGD", lr: float = 0.01, l2: float = 0.0) -> Peer:
    from river import linear_model, optim, preprocessing

    make = linear_model.LogisticRegression if classes == 2 else linear_model.SoftmaxRegression
    return RiverPeer(preprocessing.StandardScaler() | make(optimizer=getattr(optim, optimizer)(lr), l2=l2), classes)


def _bayes(inputs: int, classes: int, seed: int, detector: str = "", **settings: Any) -> Peer:
    """Gaussian naive Bayes has no settings. With a detector, River starts it afresh at each alarm."""
    from river import drift, naive_bayes

    model = naive_bayes.GaussianNB()
    if detector:
        found = getattr(drift, detector, None) or getattr(drift.binary, detector)
        early = detector == "DDM"  # it warns first, and a second model learns from then on
        model = drift.DriftRetrainingClassifier(model, found(**settings), train_in_background=early)
    return RiverPeer(model, classes)


def _replay(inputs: int, classes: int, seed: int, **settings: Any) -> Peer:
    return ReplayPeer(inputs, classes, seed, **settings)


def _evcl(inputs: int, classes: int, seed: int, batch: int = 16, **settings: Any) -> Peer:
    return StreamPeer(classes, seed, batch, **settings)


PEERS: dict[str, Make] = {
    "evcl": _evcl,
    "hoeffding adaptive tree": _hat,
    "adaptive random forest": _arf,
    "logistic regression": _logistic,
    "naive bayes": _bayes,
    "mlp with replay": _replay,
}
"""The learners, by name."""
FIXED = ("logistic regression", "naive bayes")
"""Learners that no seed changes: on real data, they are run once."""
TRIALS: dict[str, list[dict[str, Any]]] = {
    "evcl": [
        {},
        {"batch": 4},
        {"covariance": "diagonal"},
        {"inner_steps": 2},
        {"memories": ("inf", 10_000, 2_000, 300)},
        {"memories": ("inf", 1_000, 100)},
        {"standardize": False},
        {"method": "mesu"},
    ],
    "hoeffding adaptive tree": [
        {},
        {"grace_period": 50},
        {"grace_period": 50, "delta": 1e-3},
        {"grace_period": 200, "delta": 1e-3},
        {"leaf_prediction": "mc"},
        {"leaf_prediction": "mc", "grace_period": 50, "delta": 1e-3},
        {"leaf_prediction": "nb"},
        {"grace_period": 50, "delta": 1e-2, "drift_window_threshold": 100},
    ],
    "adaptive random forest": [
        {},
        {"lambda_value": 1},
        {"max_features": None},
        {"max_features": "log2"},
        {"leaf_prediction": "mc"},
        {"delta": 1e-3, "grace_period": 100},
        {"n_models": 20},
        {"n_models": 20, "leaf_prediction": "mc"},
    ],
    "logistic regression": [
        {},
        {"lr": 0.001},
        {"lr": 0.003},
        {"lr": 0.03},
        {"lr": 0.1},
        {"optimizer": "Adam", "lr": 0.001},
        {"optimizer": "Adam", "lr": 0.01},
        {"lr": 0.03, "l2": 0.001},
    ],
    "naive bayes": [
        {},
        {"detector": "ADWIN", "delta": 0.002},
        {"detector": "ADWIN", "delta": 0.0001},
        {"detector": "ADWIN", "delta": 0.05},
        {"detector": "DDM"},
        {"detector": "DDM", "drift_threshold": 4.0},
        {"detector": "PageHinkley", "threshold": 20.0},
        {"detector": "PageHinkley"},
    ],
    "mlp with replay": [
        {},
        {"lr": 3e-4},
        {"lr": 3e-3},
        {"lr": 1e-2},
        {"recent": True},
        {"recent": True, "lr": 3e-3},
        {"recent": True, "lr": 3e-3, "reservoir": 200},
        {"hidden": 128, "lr": 3e-3},
    ],
}
"""The settings that a search tries; the first are the defaults."""
