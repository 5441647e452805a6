"""Rows per second of `evcl.Stream` beside River's learners, and its memory over a long stream. Prints ratios.

    python perf/streams.py                        # 2,000 rows of each stream; memory over 50,000 rows
    python perf/streams.py --memory 1000000       # memory over a million rows

Each row is predicted before it is learned. Times are those of the processor, and the learners take turns. River's
learners take one row at a time; `evcl.Stream` takes one, or a batch: it predicts all its rows before it learns any.
The adaptive random forest is 1 in each column: a learner with 2 is twice as fast.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy is imported: every learner has one thread

import torch
from torch import Tensor

import evcl
from evcl.streams.sources import Source, generated

Run = Callable[[Tensor, Tensor], object]
STREAMS = ("sea", "hyperplane", "agrawal", "rbf", "led")
PIECE = 200  # rows that a learner takes before it is the next one's turn
UNIT = "River, adaptive random forest"


def own(batch: int) -> Run:
    """`evcl.Stream` with its defaults."""
    stream = evcl.Stream()

    def run(x: Tensor, y: Tensor) -> None:
        for start in range(0, len(y), batch):
            stream.step(x[start : start + batch], y[start : start + batch])

    return run


def rivers(name: str, classes: int) -> Run:
    """One of River's learners with its defaults."""
    from river import forest, linear_model, naive_bayes, preprocessing, tree

    logistic = linear_model.LogisticRegression if classes == 2 else linear_model.SoftmaxRegression
    makers: dict[str, Callable[[], Any]] = {
        "adaptive random forest": lambda: forest.ARFClassifier(seed=0),
        "Hoeffding adaptive tree": lambda: tree.HoeffdingAdaptiveTreeClassifier(seed=0),
        "logistic regression": lambda: preprocessing.StandardScaler() | logistic(),
        "Gaussian naive Bayes": naive_bayes.GaussianNB,
    }
    model = makers[name]()

    def run(x: Tensor, y: Tensor) -> None:
        for values, label in zip(x.tolist(), y.tolist(), strict=True):
            row = dict(enumerate(values))
            model.predict_proba_one(row)
            model.learn_one(row, label)

    return run


def learners(classes: int) -> dict[str, Callable[[], Run]]:
    """What is measured, by name."""
    names = ("adaptive random forest", "Hoeffding adaptive tree", "logistic regression", "Gaussian naive Bayes")
    return {
        **{f"River, {name}": partial(rivers, name, classes) for name in names},
        "evcl.Stream, row by row": partial(own, 1),
        **{f"evcl.Stream, {size} rows at a time": partial(own, size) for size in (16, 64)},
    }


def speeds(source: Source, rows: int) -> tuple[dict[str, float], float]:
    """How fast each learner is, as a ratio to the forest, and the rows per second of the forest, from row 200 on.

    All learners take turns, piece by piece, so that other load slows down all of them. The ratio is the median over the
    pieces.
    """
    whole = source.part(0, rows + 200, 0)
    runs = {name: make() for name, make in learners(len(source.classes)).items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for at in range(0, rows + 200, PIECE):
        for name, run in runs.items():
            start = time.process_time()
            run(whole.x[at : at + PIECE], whole.y[at : at + PIECE])
            if at >= 200:
                times[name].append(time.process_time() - start)
    ratios = {
        name: statistics.median(unit / each for unit, each in zip(times[UNIT], own, strict=True))
        for name, own in times.items()
    }
    return ratios, rows / sum(times[UNIT])


def memory(rows: int) -> None:
    """Feed a stream, and print the memory of the process every tenth of it."""
    run, done = own(64), 0
    for piece in generated("sea", "sudden", rows).read(1024):
        run(piece.x, piece.y)
        before, done = done, done + len(piece)
        if done * 10 // rows > before * 10 // rows:
            print(f"{done:>10,} rows  {resident():6.1f} MB", flush=True)


def resident() -> float:
    """MB in use by this process."""
    if not sys.platform.startswith("linux"):
        return float("nan")
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000, help="rows of each stream [2,000]")
    parser.add_argument("--memory", type=int, default=50_000, help="rows over which memory is printed [50,000]")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: speeds(generated(name, "none", args.rows + 200), args.rows) for name in STREAMS}
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    print("| rows per second, the forest is 1 | " + " | ".join(STREAMS) + " |")
    print("|---|" + "---|" * len(STREAMS))
    for who in found[STREAMS[0]][0]:
        print(f"| {who} | " + " | ".join(f"{found[name][0][who]:.2f}" for name in STREAMS) + " |")
    print("| rows per second of the forest | " + " | ".join(f"{found[name][1]:.0f}" for name in STREAMS) + " |")
    memory(args.memory)


if __name__ == "__main__":
    main()
