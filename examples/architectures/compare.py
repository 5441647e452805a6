"""Compare EVCL, EWC, naive and joint training on three architectures, with settings chosen on validation data.

    python examples/architectures/compare.py --out experiments/paper/results/architectures    # on a GPU if there is one
    python examples/architectures/compare.py --defaults --out experiments/paper/results/architectures-defaults
    # no search: every method's defaults
    python examples/architectures/compare.py --quick --out runs/quick       # two tasks, little training: does it run?
    python examples/architectures/compare.py resnet-cifar10 --trials 6 --trial-seeds 1 --epochs 10 --out ...   # less

`search.toml` defines the search, with the same number of trials for every method. Its findings are written to
OUT/search/NETWORK.json, and the results of each method's best trial on the test data to OUT/NETWORK/METHOD/result.json
(`evcl report OUT` shows them). Existing results are not computed again.

The images come from evcl's cache. For a machine without one, `--export subset.npz` writes them to a file, and `--data
subset.npz` reads it. Then the extra `data` is not needed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

import architectures
from evcl import EvclError, experiments
from evcl._core.files import write_atomically
from evcl.experiments.search import Search

HERE = Path(__file__).parent
QUICK = {"epochs": 1, "fisher_examples": 50, "predict_samples": 2}


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("network", nargs="*", help=f"some of {', '.join(architectures.NAMES)} [all]")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--data", type=Path, help="a file that --export wrote, instead of the cache")
    parser.add_argument("--export", type=Path, help="write a subset of the images, and do nothing else")
    parser.add_argument("--images", type=int, default=2000, help="of --export: training images a task [2000]")
    parser.add_argument("--test-images", type=int, default=800, help="of --export: test images a task [800]")
    parser.add_argument("--seeds", type=int, default=5, help="of the test, from 0 [5]")
    parser.add_argument("--trials", type=int, help="of each method in the search [as search.toml has it]")
    parser.add_argument("--trial-seeds", type=int, help="of each trial, the first ones [the same]")
    parser.add_argument("--epochs", type=int, help="passes over a task's data [the same]")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--defaults", action="store_true", help="no search: every method's defaults, with its epochs")
    parser.add_argument("--quick", action="store_true", help="two tasks, one epoch, two trials, two seeds")
    found = parser.parse_args(words)
    if (found.out is None) == (found.export is None):
        parser.error("one of --out and --export is needed")
    if unknown := sorted(set(found.network) - set(architectures.NAMES)):
        parser.error(f"there is no network {unknown[0]}: they are {', '.join(architectures.NAMES)}")
    least = {"images": 2, "test_images": 2, "seeds": 1, "trials": 1, "trial_seeds": 1, "epochs": 1}
    for name, low in least.items():
        value = getattr(found, name)
        if value is not None and value < low:
            parser.error(f"--{name.replace('_', '-')} must be at least {low}")
    return found


def export(path: Path, images: int, test_images: int) -> None:
    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez_compressed(file, **architectures.subset(images, test_images))  # type: ignore[arg-type]

    write_atomically(path, write)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def shortened(search: Search, asked: argparse.Namespace) -> Search:
    """The same search, changed by the command-line options."""
    given = QUICK if asked.quick else {}
    if asked.epochs:
        given = {**given, "epochs": asked.epochs}
    spaces = {
        method: [{name: given.get(name, value) for name, value in space.items()} for space in each]
        for method, each in search.spaces.items()
    }
    seeds = search.seeds[: asked.trial_seeds or (1 if asked.quick else None)]
    return replace(search, trials=asked.trials or (2 if asked.quick else search.trials), seeds=seeds, methods=spaces)


def searched(name: str, search: Search, out: Path, tasks: int | None, device: str) -> dict[str, Any]:
    """The best trial of each method; runs the search if its findings do not exist yet."""
    path = out / "search" / f"{name}.json"
    if path.exists():
        found = experiments.read_found(path, search)
    else:
        found = experiments.tune(search, name if tasks is None else f"{name}:{tasks}", device)
        experiments.write_found(path, found)
    return {method: tried[0] for method, tried in found["tried"].items()}


def usual(search: Search) -> dict[str, Any]:
    """The defaults of each method, with the epochs and batch size that the search uses for all."""
    same = ("epochs", "batch_size")
    return {m: {"settings": {key: each[0][key] for key in same}, "mean": None} for m, each in search.spaces.items()}


def compare(
    name: str, search: Search, out: Path, seeds: int, tasks: int | None, device: str, defaults: bool = False
) -> None:
    """Measure the methods on one network's test data, with the best trials of a search or with their defaults."""
    start = time.perf_counter()
    best = usual(search) if defaults else searched(name, search, out, tasks, device)
    preset, spent = "default" if defaults else search.preset, time.perf_counter() - start
    configs = [
        experiments.configure(name, method, preset, range(seeds), tasks, trial["settings"], device)
        for method, trial in best.items()
    ]
    folders = [out / name / config.method for config in configs]
    there = [experiments.open_folder(folder, config) for folder, config in zip(folders, configs, strict=True)]
    todo = [i for i, result in enumerate(there) if result is None]
    for i, result in experiments.execute_all([configs[i] for i in todo], lambda i, event: None):
        experiments.write_result(folders[todo[i]], result)
    print(f"{name}: search {spent:.0f} s, all {time.perf_counter() - start:.0f} s", flush=True)
    print(f"  {'method':8} {'validation':>11} {'test accuracy':>16} {'forgetting':>16}")
    for folder, config in zip(folders, configs, strict=True):
        result = experiments.read_result(folder / experiments.RESULT)
        mean = best[config.method]["mean"]
        tried = "-" if mean is None else f"{100 * mean:.2f}"
        numbers = [text(result.average_accuracy), text(result.forgetting)]
        print(f"  {config.method:8} {tried:>11} {numbers[0]:>16} {numbers[1]:>16}", flush=True)


def text(summary: experiments.Summary) -> str:
    if summary.mean is None:
        return "-"
    return f"{100 * summary.mean:.2f} ± {100 * (summary.std or 0):.2f}"


def main(words: Sequence[str] | None = None) -> None:
    asked = arguments(words)
    torch.set_num_threads(1)
    if asked.export:
        export(asked.export, asked.images, asked.test_images)
        return
    if asked.data:
        os.environ[architectures.DATA] = str(asked.data.absolute())  # the processes that train read it too
    search = shortened(experiments.read_search(HERE / "search.toml"), asked)
    device, _ = experiments.where(asked.device, None)
    seeds, tasks = (min(asked.seeds, 2), 2) if asked.quick else (asked.seeds, None)
    for name in asked.network or architectures.NAMES:
        compare(name, search, asked.out, seeds, tasks, device, asked.defaults)


if __name__ == "__main__":
    try:
        main()
    except EvclError as error:
        sys.exit(f"compare.py: {error}")
