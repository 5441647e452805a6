"""Search settings and test methods on streams without labels; `tabulate.py` then writes tables and figures.

    python experiments/generative/search_and_test.py characters-mnist characters-notmnist --device cuda
    python experiments/generative/search_and_test.py sotu-decades --device cuda

Without a benchmark, it does all of them. What is there already is not done again, and what was stopped resumes. Results
are in `results/BENCHMARK/METHOD/result.json`, all trials in `search/BENCHMARK/METHOD.json`.
"""

from __future__ import annotations

import argparse
import os
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from evcl.experiments import (
    HIDDEN,
    Config,
    Store,
    best_trial,
    configure,
    execute_all,
    open_folder,
    read_found,
    score_of,
    tune,
    where,
    write_found,
    write_result,
)
from evcl.experiments.search import Search
from evcl.methods import METHODS

HERE = Path(__file__).parent
PLAN: dict[str, Any] = tomllib.loads((HERE / "generative.toml").read_text("utf-8"))
BENCHMARKS: dict[str, Any] = PLAN["benchmarks"]


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)  # noqa: T201


def search_of(benchmark: str, methods: Sequence[str]) -> Search:
    """The search for these methods' settings."""
    spaces = {}
    for method in methods:
        known = METHODS[method].known_settings
        common = {name: value for name, value in BENCHMARKS[benchmark]["common"].items() if name in known}
        spaces[method] = common | PLAN["ranges"][method]
    return Search(
        benchmarks=(benchmark,),
        validation=PLAN["validation"],
        seeds=tuple(PLAN["search_seeds"]),
        trials=PLAN["trials"],
        preset="default",
        methods=spaces,
    )


def search_file(folder: Path, benchmark: str, method: str) -> Path:
    return folder / "search" / benchmark / f"{method}.json"


def result_folder(folder: Path, benchmark: str, method: str) -> Path:
    return folder / "results" / benchmark / method


def chosen(folder: Path, benchmark: str, method: str, device: str = "cpu", precision: str | None = None) -> Config:
    """The configuration that meets the test data: the best trial of the method's search."""
    found = read_found(search_file(folder, benchmark, method), search_of(benchmark, [method]))
    settings = best_trial(found, method)["settings"]
    return configure(
        benchmark, method, "default", BENCHMARKS[benchmark]["test_seeds"], None, settings, device, precision
    )


def search(folder: Path, benchmark: str, wanted: Sequence[str], device: str, precision: str | None) -> None:
    """Run the trials, and write one file per method."""
    todo = [method for method in wanted if not search_file(folder, benchmark, method).exists()]
    if not todo:
        return
    found = tune(search_of(benchmark, todo), benchmark, device, precision, store=Store(folder / "search" / HIDDEN))
    for method in todo:
        own = {key: {method: found[key][method]} for key in ("methods", "tried")}
        about = {key: value for key, value in found.items() if key != "seconds"}  # these are the seconds of all
        write_found(search_file(folder, benchmark, method), {**about, **own})
        mean = best_trial(found, method)["mean"]
        say(f"{benchmark} {method}: {'every trial diverged' if mean is None else score_of(benchmark).text(mean)}")
    say(f"{benchmark}: searched {len(todo)} methods in {found['seconds']} s")


def test(folder: Path, benchmark: str, wanted: Sequence[str], device: str, precision: str | None) -> None:
    """Run what the search chose on test data."""
    start = time.perf_counter()
    configs = [chosen(folder, benchmark, method, device, precision) for method in wanted]
    todo = [c for c in configs if open_folder(result_folder(folder, benchmark, c.method), c) is None]
    store = Store(folder / "results" / HIDDEN)
    store.declare(cell for config in todo for cell in config.cells)
    for i, result in execute_all(todo, lambda i, event: None, allow_divergence=True, store=store):
        if result.diverged:
            say(f"{benchmark} {todo[i].method}: diverged, so there is no result")
            continue
        write_result(result_folder(folder, benchmark, todo[i].method), result)
        mean = result.measure(result.score).mean
        say(f"{benchmark} {todo[i].method}: {'-' if mean is None else score_of(benchmark).text(mean)} on test data")
    if todo:
        say(f"{benchmark}: tested {len(todo)} methods in {time.perf_counter() - start:.1f} s")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmarks", nargs="*", metavar="benchmark", help=f"of {', '.join(BENCHMARKS)} [all]")
    parser.add_argument("--methods", nargs="+", help="names of methods [all of the benchmark]")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda [auto]")
    parser.add_argument("--precision", help="of matrix products: fp32, tf32 or bf16 [tf32 on a GPU]")
    parser.add_argument("--data-dir", help="a local folder with the data sets")
    parser.add_argument("--folder", type=Path, default=HERE, help="where the files are read and written [here]")
    args = parser.parse_args(words)
    if args.data_dir:
        os.environ["EVCL_DATA"] = args.data_dir
    torch.set_num_threads(1)
    device, precision = where(args.device, args.precision)
    for benchmark in args.benchmarks or BENCHMARKS:
        wanted = args.methods or BENCHMARKS[benchmark]["methods"]
        search(args.folder, benchmark, wanted, device, precision)
        test(args.folder, benchmark, wanted, device, precision)


if __name__ == "__main__":
    main()
