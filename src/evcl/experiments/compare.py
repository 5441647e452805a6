"""Compare methods: search each one's settings on validation data, then run its best trial on test data.

What is there already is not done again, and what was stopped resumes. Several processes can work at once, on different
benchmarks or methods or on the same ones.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from evcl._core.errors import EvclError
from evcl.experiments.config import Config, where
from evcl.experiments.config_file import Space
from evcl.experiments.folder import open_folder, write_result
from evcl.experiments.parallel import execute_all
from evcl.experiments.result import HIDDEN, score_of
from evcl.experiments.search import (
    Search,
    best_trial,
    named_tasks,
    read_found,
    result_name,
    tune,
    write_found,
)
from evcl.experiments.store import Store


@dataclass(frozen=True)
class Plan:
    """What a comparison consists of.

    Attributes:
        search_of: (benchmark, methods) -> the search for these methods' settings
        config_of: (benchmark, method, settings of the best trial, device, precision) -> what meets the test data
        searched: the benchmark whose search chose the settings for this one
    """

    search_of: Callable[[str, Sequence[str]], Search]
    config_of: Callable[[str, str, Space, str, str | None], Config]
    searched: Callable[[str], str] = lambda benchmark: benchmark


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)  # noqa: T201


def place(benchmark: str) -> str:
    """The name of a benchmark's folder."""
    return result_name(benchmark).removesuffix(".json")


def search_file(folder: Path, benchmark: str, method: str) -> Path:
    """All trials of a method, best first."""
    return folder / "search" / place(benchmark) / f"{method}.json"


def result_folder(folder: Path, benchmark: str, method: str) -> Path:
    """The best trial on test data."""
    return folder / "results" / place(benchmark) / method


def chosen(
    plan: Plan, folder: Path, benchmark: str, method: str, device: str = "cpu", precision: str | None = None
) -> Config:
    """The configuration that meets the test data: the best trial of the method's search."""
    source = plan.searched(benchmark)
    result = read_found(search_file(folder, source, method), plan.search_of(source, [method]))
    return plan.config_of(benchmark, method, best_trial(result, method)["settings"], device, precision)


def search(plan: Plan, folder: Path, benchmark: str, wanted: Sequence[str], device: str, precision: str | None) -> None:
    """Run the trials, and write one file per method: a method that is added later does not change the others'."""
    if plan.searched(benchmark) != benchmark:
        return
    todo = [method for method in wanted if not search_file(folder, benchmark, method).exists()]
    for method in wanted:
        if method not in todo:  # raises if the plan has changed since
            read_found(search_file(folder, benchmark, method), plan.search_of(benchmark, [method]))
    if not todo:
        return
    spec = plan.search_of(benchmark, todo)
    (stream,) = spec.benchmarks
    result = tune(spec, stream, device, precision, store=Store(folder / "search" / HIDDEN))
    score = score_of(named_tasks(stream)[0])
    for method in todo:
        own = {key: {method: result[key][method]} for key in ("methods", "tried")}
        about = {key: value for key, value in result.items() if key != "seconds"}  # these are the seconds of all
        write_found(search_file(folder, benchmark, method), {**about, **own})
        mean = best_trial(result, method)["mean"]
        say(f"{benchmark} {method}: {'every trial diverged' if mean is None else score.text(mean)}")
    say(f"{benchmark}: searched {len(todo)} methods in {result['seconds']} s")


def test(plan: Plan, folder: Path, benchmark: str, wanted: Sequence[str], device: str, precision: str | None) -> None:
    """Run what the search chose on test data."""
    start = time.perf_counter()
    configs = [chosen(plan, folder, benchmark, method, device, precision) for method in wanted]
    todo = [c for c in configs if open_folder(result_folder(folder, benchmark, c.method), c) is None]
    store = Store(folder / "results" / HIDDEN)
    store.declare(cell for config in todo for cell in config.cells)
    for i, result in execute_all(todo, lambda i, event: None, allow_divergence=True, store=store):
        if result.diverged:
            say(f"{benchmark} {todo[i].method}: diverged, so there is no result")
            continue
        write_result(result_folder(folder, benchmark, todo[i].method), result)
        mean = result.measure(result.score).mean
        text = "-" if mean is None else score_of(todo[i].benchmark).text(mean)
        say(f"{benchmark} {todo[i].method}: {text} on test data")
    if todo:
        say(f"{benchmark}: tested {len(todo)} methods in {time.perf_counter() - start:.1f} s")


def add_options(parser: argparse.ArgumentParser, folder: Path) -> None:
    """The options of every comparison."""
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda [auto]")
    parser.add_argument("--precision", help="of matrix products: fp32, tf32 or bf16 [tf32 on a GPU]")
    parser.add_argument("--data-dir", help="a local folder with the data sets")
    parser.add_argument("--folder", type=Path, default=folder, help="where the files are read and written [here]")


def prepare(args: argparse.Namespace) -> tuple[str, str | None]:
    """Follow the options; the device and the precision."""
    if args.data_dir:
        os.environ["EVCL_DATA"] = args.data_dir
    torch.set_num_threads(1)
    return where(args.device, args.precision)


def between(text: str, name: str, made: str) -> str:
    """A document with what stands between `<!-- name -->` and `<!-- end name -->` written again."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end {name} -->"
    before, found, rest = text.partition(begin)
    if not found or end not in rest:
        raise EvclError(f"the document must have the lines {begin.strip()} and {end}, with the tables between them")
    return f"{before}{begin}\n{made}\n\n{end}{rest.partition(end)[2]}"
