"""The embedded benchmarks: scikit-learn's digits, 1,400 to train and 397 to test, stratified, always the same."""

from __future__ import annotations

from functools import cache

import torch

from evcl.benchmarks.benchmark import Benchmark, Entry, Examples, stratified
from evcl.benchmarks.streams import permuted, split
from evcl.data import digits
from evcl.randomness import generator

PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
HIDDEN = (100, 100)
TEST = 397


@cache
def _examples() -> tuple[Examples, Examples]:
    images, labels = digits()
    x = torch.from_numpy(images).float() / 16
    y = torch.from_numpy(labels).long()
    train, test = stratified(y, TEST, generator(0, "digits"))
    return Examples(x[train], y[train]), Examples(x[test], y[test])


def _split(seed: int, tasks: int | None, validation: float) -> Benchmark:
    made = split(*_examples(), PAIRS[:tasks], validation)
    return Benchmark("split-digits", made, hidden=HIDDEN, seed=seed)


def _permuted(seed: int, tasks: int | None, validation: float) -> Benchmark:
    made = permuted(*_examples(), tasks or 5, seed, validation)
    return Benchmark("permuted-digits", made, hidden=HIDDEN, seed=seed)


SPLIT = Entry(
    "split-digits", "8x8 digits, 0/1 2/3 4/5 6/7 8/9, a head a task", _split, seeded=False, most_tasks=len(PAIRS)
)
PERMUTED = Entry("permuted-digits", "8x8 digits, a random pixel order a task, one head", _permuted, seeded=True)
