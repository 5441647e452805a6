"""A large CSV file: time and memory of `evcl learn` by the number of rows, beside pandas and SGDClassifier, and a run
that is killed and resumed. Prints tables of ratios.

    python perf/tables.py                                   # 12,500, 25,000 and 50,000 rows
    python perf/tables.py 250000 500000 1000000             # the tables of docs/PERFORMANCE.md

Each measurement is a process of its own, with one thread. Times are those of the processor, which other load hardly
changes. The files have 50 columns and are in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

COLUMNS, EPOCHS, WRITTEN = 50, 5, 10_000  # rows written at a time
# What a process runs; it prints its seconds, without its start, and its peak memory in MB.
MEASURED = """
import json, sys, time
from pathlib import Path
path, epochs, model = sys.argv[1], int(sys.argv[2]), sys.argv[3]
{imports}
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) / 1024
before, start = peak(), time.process_time()
{work}
print(json.dumps([time.process_time() - start, peak() - before]))
"""
WORK = {
    "evcl": (
        "import torch, evcl.tables\ntorch.set_num_threads(1)",
        "evcl.tables.learn(Path(model), Path(path), 'label', epochs=epochs)",
    ),
    "evcl, reading": (
        "import torch, evcl.tables\ntorch.set_num_threads(1)",
        "evcl.tables.learn(Path(model), Path(path), 'label', epochs=1, method='naive', settings={'batch_size': 10**6})",
    ),
    "evcl, Parquet": (
        "import torch, evcl.tables\ntorch.set_num_threads(1)",
        "evcl.tables.learn(Path(model), Path(path).with_suffix('.parquet'), 'label', epochs=1, method='naive',"
        " settings={'batch_size': 10**6})",
    ),
    "pandas, SGDClassifier": (
        "import numpy, pandas\nfrom sklearn.linear_model import SGDClassifier\n"
        "from sklearn.preprocessing import StandardScaler",
        "frame = pandas.read_csv(path)\nx = StandardScaler().fit_transform(frame.drop(columns='label'))\n"
        "SGDClassifier(loss='log_loss', max_iter=epochs, tol=None).fit(x, frame['label'])",
    ),
    "pandas, reading": (
        "import numpy, pandas\nfrom sklearn.preprocessing import StandardScaler",
        "frame = pandas.read_csv(path)\nx = StandardScaler().fit_transform(frame.drop(columns='label'))",
    ),
}


def write(path: Path, rows: int) -> None:
    """Normal numbers with four decimals; the label follows a product and a sum of them."""
    source = np.random.default_rng(0)
    with path.open("w") as file:
        file.write(",".join([*(f"column {i}" for i in range(COLUMNS)), "label"]) + "\n")
        for start in range(0, rows, WRITTEN):
            x = source.normal(size=(min(WRITTEN, rows - start), COLUMNS))
            label = np.where(x[:, 0] * x[:, 1] + x[:, 2] > 0, "yes", "no")
            numbers = ("%.4f," * COLUMNS + "%s\n") * len(x)
            cells = np.empty((len(x), COLUMNS + 1), dtype=object)
            cells[:, :-1], cells[:, -1] = x, label
            file.write(numbers % tuple(cells.ravel()))


def command(what: str, path: Path, epochs: int, model: Path) -> list[str]:
    imports, work = WORK[what]
    return [sys.executable, "-c", MEASURED.format(imports=imports, work=work), str(path), str(epochs), str(model)]


def measured(what: str, path: Path, epochs: int = EPOCHS) -> tuple[float, float]:
    """Seconds and MB of one process."""
    model = path.with_name("m.safetensors")
    model.unlink(missing_ok=True)
    done = subprocess.run(command(what, path, epochs, model), capture_output=True, text=True, check=True)
    seconds, peak = json.loads(done.stdout.splitlines()[-1])
    return seconds, peak


def growth(folder: Path, sizes: list[int]) -> None:
    print(f"{COLUMNS} columns, {EPOCHS} epochs; s, and MB above those of a process that has imported what it needs\n")
    heads = ["rows", "evcl, s", "per row", "pandas + SGD, s", "evcl / SGD", "reading CSV", "reading Parquet"]
    print(f"| {' | '.join([*heads, 'evcl, MB', '/ inputs', 'pandas, MB'])} |\n|{'---:|' * 10}")
    first = 0.0
    for rows in sizes:
        path = folder / f"{rows}.csv"
        write(path, rows)
        pd.read_csv(path).to_parquet(path.with_suffix(".parquet"))
        found = {what: measured(what, path) for what in WORK}
        (own, peak), (other, other_peak) = found["evcl"], found["pandas, SGDClassifier"]
        base, inputs = found["pandas, reading"][0], 4 * rows * COLUMNS / 2**20
        first = first or own / rows
        cells = [f"{rows:,}", f"{own:.1f}", f"{own / rows / first:.2f}", f"{other:.1f}", f"{own / other:.2f}"]
        cells += [f"{found[what][0] / base:.2f}" for what in ("evcl, reading", "evcl, Parquet")]
        print(f"| {' | '.join([*cells, f'{peak:.0f}', f'{peak / inputs:.2f}', f'{other_peak:.0f}'])} |", flush=True)


def resumed(folder: Path, rows: int) -> None:
    """Kill a `learn` when it has saved a checkpoint, as it does once a minute, run it again, and compare with one that
    was not killed.
    """
    path, epochs = folder / f"{rows}.csv", 6 * EPOCHS
    whole, own = folder / "whole.safetensors", folder / "killed.safetensors"
    once = _spent(command("evcl", path, epochs, whole))
    saved = own.with_name(f"{own.name}.checkpoint")
    killed = _spent(command("evcl", path, epochs, own), until=lambda: any(saved.glob("*.safetensors")))
    if own.exists():
        print(f"\n{rows:,} rows, {epochs} epochs: learned before the first checkpoint, which is saved after a minute")
        return
    again = _spent(command("evcl", path, epochs, own))
    same = _tensors(whole) == _tensors(own)
    print(f"\n{rows:,} rows, {epochs} epochs: {once:.1f} s at once; killed after {killed:.1f} s,", end=" ")
    print(f"resumed in {again:.1f} s: {(killed + again) / once:.2f} times the time in all;", end=" ")
    print(f"the models are {'equal' if same else 'DIFFERENT'}")


def _spent(arguments: list[str], until: Callable[[], bool] = lambda: False) -> float:
    """The processor's seconds of a process, which is killed when `until` is true."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found: Any = 0, 0, None
    while not found[0]:
        time.sleep(0.1)
        found = os.wait4(process.pid, os.WNOHANG)
        if not found[0] and until():
            process.kill()
            found = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(found[1])
    if process.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(f"the process ended with {process.returncode}")
    return float(found[2].ru_utime + found[2].ru_stime)


def _tensors(path: Path) -> dict[str, bytes]:
    from safetensors.numpy import load_file

    return {name: array.tobytes() for name, array in load_file(path).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=int, default=[12_500, 25_000, 50_000])
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="evcl-perf-") as folder:
        growth(Path(folder), args.rows)
        resumed(Path(folder), args.rows[-1])


if __name__ == "__main__":
    main()
