"""Splitting data into files should do no harm: files of one distribution, learned one after another through one head.

With exact inference the result would be the same as from learning all rows at once. Each line has the test accuracy
(per cent, mean over the seeds) of learning all rows at once, and of learning the files by naive training and by the
method; "distance left" is the method's distance to "at once" as a fraction of naive training's. All settings except the
epochs are the defaults.

    python laws/cuts.py --method evcl --seeds 5
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits, make_classification

import evcl

Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # x and y for training, x and y for testing


class Case(NamedTuple):
    rows: Callable[[int], Rows]
    files: list[int]
    epochs: int
    hidden: list[int]


def digits(seed: int) -> Rows:
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = (x[order] / 16).astype("float32"), y[order]
    return x[:1300], y[:1300], x[1300:], y[1300:]


def table(apart: float) -> Callable[[int], Rows]:
    """Three classes of four clusters each, not linearly separable."""

    def rows(seed: int) -> Rows:
        x, y = make_classification(
            12_000, 10, n_informative=8, n_redundant=0, n_classes=3, n_clusters_per_class=4, class_sep=apart,
            flip_y=0.05, random_state=1000 + seed,
        )  # fmt: skip
        x = x.astype("float32")
        return x[:10_000], y[:10_000], x[10_000:], y[10_000:]

    return rows


CASES = {
    "digits, 26 files of 50, 5 epochs": Case(digits, [50] * 26, 5, [100]),
    "digits, 26 files of 50": Case(digits, [50] * 26, 50, [100]),
    "digits, 13 files of 100": Case(digits, [100] * 13, 50, [100]),
    "digits, 60 rows, then 1,240": Case(digits, [60, 1240], 50, [100]),
    "table, 20 files of 500": Case(table(0.9), [500] * 20, 50, [50]),
    "a clearer table, 20 files of 500": Case(table(1.3), [500] * 20, 50, [50]),
}


def accuracy(case: Case, method: str, seed: int, files: list[int], **settings: Any) -> float:
    x, y, x_test, y_test = case.rows(seed)
    network = evcl.nn.mlp(x.shape[1], case.hidden)
    learner = evcl.Learner(network, method, epochs=case.epochs, seed=seed, **settings)
    ends = np.cumsum(files)
    for k, (start, end) in enumerate(zip(ends - files, ends, strict=True)):
        learner.learn((x[start:end], y[start:end]), task=str(k), head="0" if k else "new")
    return 100 * float((learner.predict(x_test) == y_test).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="evcl")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other settings of the method")
    options = parser.parse_args()
    settings = dict(one.split("=", 1) for one in options.set)
    torch.set_num_threads(1)
    print(f"|  | at once, {options.method} | naive | {options.method} | ± | distance left |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name in options.cases:
        case, seeds = CASES[name], range(options.seeds)
        once, naive, own = (
            np.array([accuracy(case, method, seed, files, **given) for seed in seeds])
            for method, files, given in (
                (options.method, [sum(case.files)], settings),
                ("naive", case.files, {}),
                (options.method, case.files, settings),
            )
        )
        left = (once - own).mean() / max(1e-9, (once - naive).mean())
        means = " | ".join(f"{each.mean():.1f}" for each in (once, naive, own))
        print(f"| {name} | {means} | {own.std(ddof=1):.1f} | {left:.2f} |", flush=True)


if __name__ == "__main__":
    main()
