"""On one task, EVCL with its defaults should be as well calibrated as the same network with plain weights.

    python laws/one_task.py [--quick] [--more] [--case NAME] [--epochs N] [--methods M ...] [--set NAME=VALUE ...]

Both learn with the same epochs, learning rate and batches, and are measured on held-out rows. `difference` is the
method's mean NLL minus the plain network's, with its standard error over pairs of a fold and a seed. It should be at
most one standard error; a star marks larger differences. The ECE is that of all held-out rows of a seed together,
paired over seeds. Tables are standardised by their training rows, and learned as by `EVCLClassifier`. The last row of
each method counts on how many of the nine, or of those asked for, its mean is lower, and on how many it has no star.

`--more` adds a generated table with noisy labels, and 1,000 images of each image data set that is in the cache.

The last lines show the mean epistemic entropy of new rows after learning more and more rows of one table: it should
fall.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from comparing import parsed, save, settings_of
from one_posterior import ResNet, ViT
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from sklearn.model_selection import StratifiedKFold, train_test_split
from torch import nn

import evcl
from evcl import data, metrics
from evcl.methods import METHODS

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


def images(name: str) -> Case:
    """1,000 of the data set's training images to learn, and 2,000 others held out."""

    def splits(seed: int, folds: int) -> Iterator[Split]:
        found = data.load(name, offline=True)
        chosen = np.random.default_rng(seed).choice(len(found.train_labels), 3000, replace=False)
        x = (np.asarray(found.train_images)[chosen] / 255).astype("float32").reshape(3000, -1)
        y = np.asarray(found.train_labels)[chosen].astype("int64")
        yield x[:1000], y[:1000], x[1000:], y[1000:]

    return Case(splits, lambda columns: evcl.nn.mlp(columns, [100]))


def noisy(seed: int, folds: int) -> Iterator[Split]:
    x, y = rule(2300, seed)
    yield x[:300], y[:300], x[300:], y[300:]


MORE = {
    "noisy table": Case(noisy, lambda columns: evcl.nn.mlp(columns, [100])),
    **{name: images(name) for name in ("mnist", "notmnist", "fashion-mnist", "cifar10")},
}


def available(name: str) -> bool:
    """Whether a case needs no data, or only some that the cache has."""
    try:
        return name in CASES or bool(next((CASES | MORE)[name].splits(0, 1)))
    except evcl.EvclError:
        return False


def learned(method: str, network: nn.Module, seed: int, x: Array, y: Array, **settings: Any) -> evcl.Learner:
    torch.manual_seed(seed)
    learner = evcl.Learner(network, method, seed=seed, init="draw", **settings)
    learner.learn((x, y), "task")
    return learner


class Measured(NamedTuple):
    """NLL and accuracy in per cent for each fold and seed, and ECE for each seed."""

    nll: Array
    ece: Array
    accuracy: Array


def measured(name: str, method: str, options: argparse.Namespace) -> Measured:
    case, (seeds, folds) = (CASES | MORE)[name], (3, 2) if options.quick else (5, 5)
    settings = {} if method == "naive" else settings_of(method, options.set)
    nll, accuracy, ece = [], [], []
    for seed in range(seeds):
        rows = []
        for x, y, new_x, new_y in case.splits(seed, folds):
            given: dict[str, Any] = {"epochs": options.epochs or case.epochs, **settings}
            p = learned(method, case.network(x.shape[1]), seed, x, y, **given).predict_proba(new_x)
            nll.append(metrics.nll(p, new_y))
            accuracy.append(100 * float((p.argmax(1) == new_y).mean()))
            rows.append((p, new_y))
        every, truth = (np.concatenate(part) for part in zip(*rows, strict=True))
        ece.append(metrics.expected_calibration_error(every, truth))
    return Measured(np.array(nll), np.array(ece), np.array(accuracy))


def behind(ours: Array, plain: Array) -> tuple[float, float]:
    """The mean difference of pairs, and its standard error."""
    gap = ours - plain
    return float(gap.mean()), float(gap.std(ddof=1) / np.sqrt(len(gap))) if len(gap) > 1 else float("nan")


def line(name: str, method: str, ours: Measured, plain: Measured) -> str:
    found = [f"{name:<20}{method:<12}"]
    for one, other, digit in zip(ours, plain, (4, 4, 1), strict=True):
        gap, error = behind(one, other)
        found.append(f"{one.mean():>8.{digit}f}{other.mean():>8.{digit}f}{gap:>+9.{digit}f} ±{error:>7.{digit}f}")
        if digit == 4:
            found.append("  " if gap <= error else " *")
    return "".join(found)


def rule(rows: int, seed: int) -> tuple[Array, Array]:
    """Eight columns, two classes with a nonlinear boundary, and some noise."""
    source = np.random.default_rng(seed)
    x = source.standard_normal((rows, 8)).astype("float32")
    score = x[:, 0] * x[:, 1] + x[:, 2] + 0.5 * x[:, 3] ** 2 - 0.5 + 0.5 * source.standard_normal(rows)
    return x, (score > 0).astype("int64")


def epistemic(method: str, options: argparse.Namespace) -> list[float]:
    found, settings = [], {"epochs": options.epochs or 50, **settings_of(method, options.set)}
    for rows in ROWS:
        each = []
        for seed in range(3 if options.quick else 5):
            x, y = rule(ROWS[-1] + 2000, seed)
            learner = learned(method, evcl.nn.mlp(8, [50]), seed, x[:rows], y[:rows], **settings)
            each.append(float(learner.predictions(x[ROWS[-1] :]).epistemic.mean()))
        found.append(float(np.mean(each)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a method with plain weights on one task.")
    parser.add_argument("--quick", action="store_true", help="2 folds and 3 seeds instead of 5 and 5")
    parser.add_argument("--more", action="store_true", help="a generated table and the cached image data sets, too")
    parser.add_argument("--case", action="append", choices=[*CASES, *MORE, "epistemic"])
    parser.add_argument("--epochs", type=int, help="instead of each case's own number")
    parser.add_argument("--methods", nargs="+", default=["evcl"], choices=METHODS, metavar="METHOD")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="their settings")
    parser.add_argument("--out", type=Path, help="JSON file to save every figure in")
    options = parsed(parser)
    cases = options.case or [*CASES, *(name for name in MORE if options.more and available(name)), "epistemic"]
    kept: dict[str, dict[str, Measured]] = {}
    print(f"{'':<32}{'NLL':>8}{'plain':>8}{'difference':>18}  {'ECE':>8}{'plain':>8}{'difference':>18}  "
          f"{'right, %':>8}{'plain':>8}{'difference':>18}")  # fmt: skip
    for name in (case for case in cases if case != "epistemic"):
        kept[name] = {method: measured(name, method, options) for method in dict.fromkeys(["naive", *options.methods])}
        for method in options.methods:
            print(line(name, method, kept[name][method], kept[name]["naive"]), flush=True)
    for method in options.methods if kept else ():
        counts = []
        for part, title in enumerate(("NLL", "ECE")):
            gaps = [behind(one[method][part], one["naive"][part]) for one in kept.values()]
            lower, level = sum(gap < 0 for gap, _ in gaps), sum(gap <= error for gap, error in gaps)
            counts.append(f"{title} lower on {lower} of {len(gaps)}, not behind on {level}")
        print(f"{'in all':<20}{method:<12}{'; '.join(counts)}")
    if "epistemic" in cases:
        print("\nrows learned       " + "".join(f"{rows:>10,}" for rows in ROWS))
        for method in options.methods:
            if METHODS[method].bayesian:
                found = epistemic(method, options)
                print(f"epistemic, {method:<8}" + "".join(f"{value:>10.5f}" for value in found), flush=True)
    rows = {name: {m: [part.tolist() for part in one] for m, one in own.items()} for name, own in kept.items()}
    save(options, rows)


if __name__ == "__main__":
    main()
