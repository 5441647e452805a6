"""The curves of the paper's five figures, and why they differ from what its equations give."""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files

Curve = tuple[float, ...]


@cache
def published() -> dict[tuple[str, str], Curve]:
    """Maps (benchmark, method) to the published average accuracy after each task."""
    lines = files("evcl.report").joinpath("published.csv").read_text("utf-8").splitlines()
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        curve = found.setdefault((row["benchmark"], row["method"]), {})
        curve[int(row["tasks_trained"])] = float(row["average_accuracy"])
    return {key: tuple(curve[t] for t in sorted(curve)) for key, curve in found.items()}


# Paragraphs of the page and of tables.md; `...` marks names in the released code.
WHY = (
    "Published values are read from the five figures of the paper (Batra and Clark, 2024, arXiv:2406.15972), which "
    "averages three runs. They are not what the paper's equations give, and a difference from them says nothing about "
    "this implementation. What follows comes from reading the code released with the paper "
    "(github.com/hunarbatra/elastic-variational-continual-learning, commit 26bd0373), not from our measurements.",
    "Its elastic term does not reach a gradient: `run_evcl.py:97` takes its step before lines 99 to 105 add the "
    "penalty to a printed number, and lines 43 to 46 detach the Fisher's graph, so all its entries are 0. Its EVCL "
    "is therefore its VCL with other random draws. Its EWC takes one Adam step per epoch (`run_ewc.py:76,94`), and "
    "its Fisher is 0 as well. Its notMNIST test set is its training set (`data_generator.py:121-124`).",
    "It also differs in the protocol: heads have 10 outputs for 2 classes and, in the multi-head networks, are not "
    "Bayesian; the network is first trained without uncertainty on task 1, and the prior is centred there; a coreset "
    "has 200 examples in total, stays in the training data, and is trained through the current head only.",
)
