"""A learner that counts labels, with the interface of `evcl.Stream`: what it predicts can be worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np


class Counting:
    """Predicts the frequencies of the labels learned so far, and records what it was asked to do."""

    likelihood = "categorical"

    def __init__(self, record=True):
        self._record = record
        self.classes, self.alarms, self.calls, self._counts, self.rows = [], [], [], {}, 0

    def predict_proba(self, x):
        self.calls.append(("predict", len(x)))
        total = sum(self._counts.values())
        return np.array([[self._counts[c] / total for c in self.classes]] * len(x)).reshape(len(x), -1)

    def learn(self, x, y):
        if self._record:
            self.calls.append(("learn", x[:, 0].tolist()))
        for label in y.tolist():
            self._counts[label] = self._counts.get(label, 0) + 1
        self.classes = list(self._counts)
        return SimpleNamespace(surprise=0.0, alarm=None)

    def step(self, x, y):
        return self.predict_proba(x), self.learn(x, y)


class Averaging:
    """Predicts the mean of the numbers learned so far."""

    likelihood = "gaussian"

    def __init__(self):
        self.alarms, self._seen, self.rows = [], [0.0], 0

    def predictions(self, x):
        mean = float(np.mean(self._seen))
        return SimpleNamespace(mean=np.full(len(x), mean), std=np.ones(len(x)))

    def learn(self, x, y):
        self._seen += y.tolist()
        return SimpleNamespace(surprise=0.0, alarm=None)

    def step(self, x, y):
        return self.predictions(x), self.learn(x, y)
