"""Sites that hand over posteriors should end near one model that has seen all rows: `evcl.merge` on digits.

A base learns first. Each site continues it with rows of its own; then the models are merged. Each line has the test
accuracy (per cent, mean and standard deviation over the seeds) of the base, of a site alone (the mean over the sites),
of the merged model, of one model that visits the sites one after another, and of one that learns all their rows at
once.

    python laws/sites.py --method evcl --seeds 5
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from sklearn.datasets import load_digits

import evcl

Split = Callable[[np.ndarray, np.random.Generator], tuple[np.ndarray, Sequence[np.ndarray]]]  # labels -> base, sites


def at_random(y: np.ndarray, source: np.random.Generator) -> tuple[np.ndarray, Sequence[np.ndarray]]:
    """The base has 200 rows of all classes, and each of three sites a third of the rest."""
    rows = np.arange(len(y))
    return rows[:200], np.array_split(rows[200:], 3)


def by_class(y: np.ndarray, source: np.random.Generator) -> tuple[np.ndarray, Sequence[np.ndarray]]:
    """The base has 200 rows of all classes, and each of three sites the rest of three or four classes."""
    rows, classes = np.arange(200, len(y)), np.array_split(source.permutation(10), 3)
    return np.arange(200), [rows[np.isin(y[200:], some)] for some in classes]


def new_classes(y: np.ndarray, source: np.random.Generator) -> tuple[np.ndarray, Sequence[np.ndarray]]:
    """The base has four classes, and each of three sites two others."""
    order = source.permutation(10)
    return np.isin(y, order[:4]).nonzero()[0], [np.isin(y, some).nonzero()[0] for some in order[4:].reshape(3, 2)]


def shared_new_classes(y: np.ndarray, source: np.random.Generator) -> tuple[np.ndarray, Sequence[np.ndarray]]:
    """The base has four classes, and each of two sites four others; two of these are the same."""
    order, first = source.permutation(10), np.arange(len(y)) < len(y) // 2
    sites = [(first & np.isin(y, order[4:8])).nonzero()[0], (~first & np.isin(y, order[6:])).nonzero()[0]]
    return np.isin(y, order[:4]).nonzero()[0], sites


SPLITS: dict[str, Split] = {
    "at random": at_random,
    "by class": by_class,
    "new classes": new_classes,
    "new classes, shared": shared_new_classes,
}


def accuracies(split: Split, method: str, seed: int, file: Path) -> list[float]:
    source = np.random.default_rng(seed)
    x, y = load_digits(return_X_y=True)
    order = source.permutation(len(x))
    x, y = (x[order] / 16).astype("float32"), y[order]
    test, (x, y) = (x[1300:], y[1300:]), (x[:1300], y[:1300])
    first, sites = split(y, source)

    def after(*parts: np.ndarray) -> evcl.Learner:
        learner = evcl.load(file)
        for i, part in enumerate(parts):
            learner.learn((x[part], y[part]), f"part {i}", head=0)
        return learner

    base = evcl.Learner(evcl.nn.mlp(64, [100]), method, seed=seed)
    base.learn((x[first], y[first]), "base")
    base.save(file)
    alone = [after(part) for part in sites]
    models = [evcl.merge(base, alone), after(*sites), after(np.concatenate(sites))]
    found = [100 * np.mean([one.measure(test, 0).accuracy for one in some]) for some in ([base], alone)]
    return [*map(float, found), *(100 * one.measure(test, 0).accuracy for one in models)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="evcl")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", evcl.ForgettingWarning)
    columns = ("base", "a site alone", "merged", "one after another", "all at once")
    print(f"{options.method:<20}" + "".join(f"{column:>19}" for column in columns))
    for name, split in SPLITS.items():
        with TemporaryDirectory() as folder:
            every = [accuracies(split, options.method, seed, Path(folder) / "base") for seed in range(options.seeds)]
        cells = [
            f"{np.mean(one):.1f} ± {np.std(one, ddof=1) if len(one) > 1 else 0:.1f}" for one in zip(*every, strict=True)
        ]
        print(f"{name:<20}" + "".join(f"{cell:>19}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
