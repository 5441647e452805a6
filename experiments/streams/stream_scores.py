"""What a learner's predictions are worth: the library's own prequential scores, and a second log-loss.

Rows whose label has not come before are not scored: no learner could know it. River's trees and naive Bayes often say
that a class is impossible, and one such error costs as much as 50 ordinary ones. So there is a second log-loss,
`nll_smoothed`, of 0.99 p + 0.01 / classes, with the same rule for every learner.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from evcl.streams.prequential import Prequential

SMOOTHED = 0.01


class Scores:
    """The scores of rows from `skip` on."""

    def __init__(self, classes: int, skip: int = 0) -> None:
        self.classes, self.skip, self.rows = classes, skip, 0
        self.scores = Prequential("classes")
        self.seen: set[int] = set()
        self.smoothed = 0.0

    def add(self, probabilities: NDArray[np.float64], labels: NDArray[np.int64]) -> None:
        known = np.ones(len(labels), bool)
        for label in set(labels.tolist()) - self.seen:
            known[int(np.argmax(labels == label))] = False
            self.seen.add(label)
        known &= np.arange(self.rows, self.rows + len(labels)) >= self.skip
        self.rows += len(labels)
        p, y = probabilities[known], labels[known]
        if len(y):
            self.scores.add(p, y, range(self.classes))
            own = (1 - SMOOTHED) * p[np.arange(len(y)), y] + SMOOTHED / self.classes
            self.smoothed -= float(np.log(own).sum())

    def found(self) -> dict[str, float]:
        """The measures over all rows that are scored."""
        measures = {**self.scores.overall, "nll_smoothed": self.smoothed / max(self.scores.rows, 1)}
        return {name: round(value, 6) for name, value in measures.items()}
