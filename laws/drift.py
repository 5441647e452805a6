"""A column that moves should not stop a model from learning: files whose numbers jump, change their unit, or drift.

Two columns, a and b; the label is yes if, in each file's own standard deviations, their sum is above 0. Column a moves
from file to file. Each line has the test accuracy (per cent, mean and standard deviation over the seeds) of the last
file and of the first, after all files: with the scale that follows (`--unknown learn`) and with that of the first file
(`--unknown missing`).

    python laws/drift.py --seeds 5
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import numpy as np

from evcl import tables
from evcl.tables.source import Unknown

# The mean and the standard deviation of column a, file by file
MOVES: dict[str, list[tuple[float, float]]] = {
    "stays": [(70, 10), (70, 10)],
    "jumps by 5 deviations": [(70, 10), (120, 10)],
    "jumps by 50": [(70, 10), (570, 10)],
    "grams for kilograms": [(70, 10), (70_000, 10_000)],
    "tonnes for kilograms": [(70, 10), (0.07, 0.01)],
    "millimetres for metres, around 0": [(0, 1), (0, 1000)],
    "drifts by 2 per file, 10 files": [(70 + 20 * i, 10) for i in range(10)],
}
ROWS = 500


def write(path: Path, mean: float, std: float, seed: int) -> Path:
    a, b = np.random.default_rng(seed).normal(size=(2, ROWS))
    lines = [f"{mean + std * x},{y},{'yes' if x + y > 0 else 'no'}" for x, y in zip(a, b, strict=True)]
    path.write_text("\n".join(["a,b,label", *lines]) + "\n")
    return path


def accuracies(files: list[tuple[float, float]], unknown: Unknown, seed: int, folder: Path) -> list[float]:
    """Of the last file and of the first, on new rows."""
    model, data = folder / "m.safetensors", folder / "data.csv"
    for i, (mean, std) in enumerate(files):
        first = {"target": "label", "seed": seed} if i == 0 else {}
        write(data, mean, std, 100 * seed + i)
        tables.learn(model, data, task=str(i), unknown=unknown, **first)  # type: ignore[arg-type]
    found = []
    for mean, std in (files[-1], files[0]):
        told = tables.predict(model, write(data, mean, std, 100_000 + seed), folder / "out.csv")
        found.append(100 * told.right / told.labelled)
    model.unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    print("| column a | scale follows: last file | first file | first file's scale: last file | first file |")
    print("|---|---|---|---|---|")
    for name, files in MOVES.items():
        cells = []
        for unknown in get_args(Unknown)[:2]:
            with TemporaryDirectory() as folder:
                found = np.array([accuracies(files, unknown, seed, Path(folder)) for seed in range(args.seeds)])
            deviation = found.std(0, ddof=1) if args.seeds > 1 else np.zeros(2)
            cells += [f"{m:.1f} ± {s:.1f}" for m, s in zip(found.mean(0), deviation, strict=True)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
