"""On one task, EVCL with its defaults should be as well calibrated as the same network with plain weights.

    python laws/one_task.py [--quick] [--case NAME] [--epochs N] [--set NAME=VALUE]

Both learn with the same epochs, learning rate and batches, and are measured on held-out rows. `difference` is EVCL's
mean NLL minus the plain network's, with its standard error over pairs of a fold and a seed. It should be at most one
standard error; a star marks larger differences. The ECE is that of all held-out rows of a seed together, paired over
seeds. Tables are standardised by their training rows, and learned as by `EVCLClassifier`.

The last lines show the mean epistemic entropy of new rows after learning more and more rows of one table: it should
fall.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from one_posterior import ResNet, ViT
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from sklearn.model_selection import StratifiedKFold, train_test_split
from torch import nn

import evcl
from evcl import metrics

Array = np.ndarray[Any, Any]
Split = tuple[Array, Array, Array, Array]  # x and y for training, x and y held out
ROWS = (20, 50, 100, 300, 1000, 10_000)


@dataclass(frozen=True)
class Case:
    splits: Callable[[int, int], Iterator[Split]]  # (seed, maximum number of folds, if there are folds)
    network: Callable[[int], nn.Module]  # called with the number of columns
    epochs: int = 50


def conv() -> nn.Module:
    layers = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(512, 64), nn.ReLU())


def table(load: Callable[..., Any]) -> Case:
    def splits(seed: int, folds: int) -> Iterator[Split]:
        x, y = load(return_X_y=True)
        for learned, held in list(StratifiedKFold(5, shuffle=True, random_state=seed).split(x, y))[:folds]:
            mean, std = x[learned].mean(0), x[learned].std(0)
            scaled = ((x - mean) / np.where(std > 0, std, 1)).astype("float32")
            yield scaled[learned], y[learned], scaled[held], y[held]

    return Case(splits, lambda columns: evcl.nn.mlp(columns, [100]))


def digits(rows: int, make: Callable[[], nn.Module] | None = None, epochs: int = 50) -> Case:
    def splits(seed: int, folds: int) -> Iterator[Split]:
        x, y = load_digits(return_X_y=True)
        x = (x / 16).astype("float32").reshape(-1, *((64,) if make is None else (1, 8, 8)))
        x, new_x, y, new_y = train_test_split(x, y, train_size=rows, test_size=497, random_state=seed)
        yield x, y, new_x, new_y

    return Case(splits, lambda columns: evcl.nn.mlp(columns, [100]) if make is None else make(), epochs)


CASES = {
    "iris": table(load_iris),
    "wine": table(load_wine),
    "breast cancer": table(load_breast_cancer),
    "digits": table(load_digits),
    "200 digits": digits(200),
    "1,300 digits": digits(1300),
    "ResNet, batch norm": digits(1300, lambda: ResNet(nn.BatchNorm2d), 15),
    "ViT": digits(1300, ViT, 15),
    "conv": digits(1300, conv, 15),
}


def learned(method: str, network: nn.Module, seed: int, x: Array, y: Array, **settings: Any) -> evcl.Learner:
    torch.manual_seed(seed)
    learner = evcl.Learner(network, method, seed=seed, init="draw", **settings)
    learner.learn((x, y), "task")
    return learner


def compare(name: str, case: Case, seeds: int, folds: int, epochs: int | None, settings: dict[str, str]) -> str:
    nll: list[list[float]] = []
    ece: list[list[float]] = []
    accuracy: list[list[float]] = []
    for seed in range(seeds):
        rows = []
        for x, y, new_x, new_y in case.splits(seed, folds):
            both = []
            for method in ("evcl", "naive"):
                given: dict[str, Any] = {"epochs": epochs or case.epochs, **(settings if method == "evcl" else {})}
                both.append(learned(method, case.network(x.shape[1]), seed, x, y, **given).predict_proba(new_x))
            nll.append([metrics.nll(p, new_y) for p in both])
            accuracy.append([100 * float((p.argmax(1) == new_y).mean()) for p in both])
            rows.append((*both, new_y))
        ours, plain, truth = (np.concatenate(part) for part in zip(*rows, strict=True))
        ece.append([metrics.expected_calibration_error(p, truth) for p in (ours, plain)])
    found = [f"{name:<20}"]
    for pairs, digit in ((nll, 4), (ece, 4), (accuracy, 1)):
        mean = np.mean(pairs, 0)
        gap = np.array(pairs) @ [1, -1]
        error = gap.std(ddof=1) / np.sqrt(len(gap)) if len(gap) > 1 else np.nan
        found.append(f"{mean[0]:>8.{digit}f}{mean[1]:>8.{digit}f}{gap.mean():>+9.{digit}f} ±{error:>7.{digit}f}")
        if digit == 4:
            found.append("  " if gap.mean() <= error else " *")
    return "".join(found)


def rule(rows: int, seed: int) -> tuple[Array, Array]:
    """Eight columns, two classes with a nonlinear boundary, and some noise."""
    source = np.random.default_rng(seed)
    x = source.standard_normal((rows, 8)).astype("float32")
    score = x[:, 0] * x[:, 1] + x[:, 2] + 0.5 * x[:, 3] ** 2 - 0.5 + 0.5 * source.standard_normal(rows)
    return x, (score > 0).astype("int64")


def epistemic(seeds: int, epochs: int | None, settings: dict[str, str]) -> list[float]:
    found = []
    for rows in ROWS:
        each = []
        for seed in range(seeds):
            x, y = rule(ROWS[-1] + 2000, seed)
            learner = learned("evcl", evcl.nn.mlp(8, [50]), seed, x[:rows], y[:rows], epochs=epochs or 50, **settings)
            each.append(float(learner.predictions(x[ROWS[-1] :]).epistemic.mean()))
        found.append(float(np.mean(each)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare EVCL with plain weights on one task.")
    parser.add_argument("--quick", action="store_true", help="2 folds and 3 seeds instead of 5 and 5")
    parser.add_argument("--case", action="append", choices=[*CASES, "epistemic"])
    parser.add_argument("--epochs", type=int, help="instead of each case's own number")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of EVCL")
    given = parser.parse_args()
    settings = dict(word.split("=", 1) for word in given.set)
    torch.set_num_threads(1)
    seeds, folds = (3, 2) if given.quick else (5, 5)
    print(f"{'':<20}{'NLL':>8}{'plain':>8}{'difference':>18}  {'ECE':>8}{'plain':>8}{'difference':>18}  "
          f"{'right, %':>8}{'plain':>8}{'difference':>18}")  # fmt: skip
    for name, case in CASES.items():
        if given.case is None or name in given.case:
            print(compare(name, case, seeds, folds, given.epochs, settings), flush=True)
    if given.case is None or "epistemic" in given.case:
        found = epistemic(seeds, given.epochs, settings)
        print("\nrows learned   " + "".join(f"{rows:>10,}" for rows in ROWS))
        print("epistemic      " + "".join(f"{value:>10.5f}" for value in found))


if __name__ == "__main__":
    main()
