"""Search, test and weigh every method of the table of the field; `write_tables.py` then writes the tables.

    python experiments/field/run.py search split-mnist --device cuda    # 8 trials per method, on validation data
    python experiments/field/run.py test split-mnist --device cuda      # the best trial of each, on test data
    python experiments/field/run.py memory split-mnist                  # how many bytes each keeps between tasks

Without a benchmark, each does all of them. What is there already is not done again, and what was stopped resumes.
Several processes can work at once, on different benchmarks or methods or on the same ones.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from field import (
    BENCHMARKS,
    FIELD,
    HERE,
    SCENARIOS,
    chosen,
    methods_on,
    result_folder,
    search_file,
    search_of,
    searched,
    stream_of,
)

from evcl import benchmarks, methods
from evcl._core.files import write_atomically
from evcl._core.settings import Settings
from evcl.experiments import (
    HIDDEN,
    Config,
    Store,
    best_trial,
    configure,
    execute_all,
    open_folder,
    read_found,
    tune,
    where,
    write_found,
    write_result,
)
from evcl.experiments.run import network
from evcl.experiments.search import named_tasks, trials
from evcl.training import Run, learn_stream

ROWS = 512  # enough to keep as many examples as with a whole task


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)  # noqa: T201


def search(folder: Path, benchmark: str, wanted: Sequence[str], device: str, precision: str | None) -> None:
    """Run the trials, and write one file per method: a method that is added later does not change the others'."""
    if searched(benchmark) != benchmark:
        return
    todo = [method for method in wanted if not search_file(folder, benchmark, method).exists()]
    for method in wanted:
        if method not in todo:  # raises if field.toml has changed since
            read_found(search_file(folder, benchmark, method), search_of(benchmark, [method]))
    if not todo:
        return
    found = tune(
        search_of(benchmark, todo), stream_of(benchmark), device, precision, store=Store(folder / "search" / HIDDEN)
    )
    for method in todo:
        own = {key: {method: found[key][method]} for key in ("methods", "tried")}
        about = {key: value for key, value in found.items() if key != "seconds"}  # these are the seconds of all
        write_found(search_file(folder, benchmark, method), {**about, **own})
        mean = best_trial(found, method)["mean"]
        say(f"{benchmark} {method}: {'every trial diverged' if mean is None else f'{100 * mean:.2f}'}")
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
        say(f"{benchmark} {todo[i].method}: {100 * (result.average_accuracy.mean or 0):.2f}")
    if todo:
        say(f"{benchmark}: tested {len(todo)} methods in {time.perf_counter() - start:.1f} s")


def memory(folder: Path, benchmark: str, wanted: Sequence[str], device: str, precision: str | None) -> None:
    """Write how many bytes each method keeps between tasks into `results/memory.json`."""
    path = folder / "results" / "memory.json"
    known = json.loads(path.read_text("utf-8")) if path.exists() else {}
    own = known.setdefault(benchmark, {})
    for method in wanted:
        if method not in own:
            name, tasks = named_tasks(stream_of(benchmark))
            settings = trials(search_of(searched(benchmark), [method]), method)[0]
            own[method] = kept_bytes(configure(name, method, "default", (0,), tasks, settings))
            say(f"{benchmark} {method}: {own[method]:,} bytes")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: temporary.write_text(json.dumps(known, indent=1) + "\n", "utf-8"))


def kept_bytes(config: Config) -> int:
    """The size of the weights and the memory after the last task. A tensor that is both counts once.

    It depends on the shapes of the data alone, so a pass over a few rows of each task is enough.
    """
    stream = benchmarks.get(config.benchmark, 0, config.tasks)
    few = torch.arange(ROWS)
    tasks = [
        replace(task, train=task.train.select(few[: len(task.train)]), test=task.test.select(few[:1]))
        for task in stream
    ]
    run = Run(
        network(stream),
        methods.get(config.method),
        [Settings({**config.settings, "epochs": 1})],
        config.seeds,
        draw=True,
    )
    learn_stream(run, [benchmarks.Benchmark(stream.name, tasks, hidden=stream.hidden)])
    sizes = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in run.tensors().values()}
    return sum(sizes.values())


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {"search": search, "test": test, "memory": memory}
    parser.add_argument("command", choices=commands)
    parser.add_argument(
        "benchmarks", nargs="*", metavar="benchmark", help=f"of {', '.join([*BENCHMARKS, *SCENARIOS])} [all]"
    )
    parser.add_argument("--methods", nargs="+", default=["fast", "slow"], help="names, fast or slow [fast slow]")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda [auto]")
    parser.add_argument("--precision", help="of matrix products: fp32, tf32 or bf16 [tf32 on a GPU]")
    parser.add_argument("--data-dir", help="a local folder with the data sets")
    parser.add_argument("--folder", type=Path, default=HERE, help="where the files are read and written [here]")
    args = parser.parse_args(words)
    if args.data_dir:
        os.environ["EVCL_DATA"] = args.data_dir
    torch.set_num_threads(1)
    device, precision = where(args.device, args.precision)
    asked = {method for name in args.methods for method in FIELD.get(name, [name])}
    for benchmark in args.benchmarks or [*BENCHMARKS, *SCENARIOS]:
        wanted = [method for method in methods_on(benchmark) if method in asked]
        commands[args.command](args.folder, benchmark, wanted, device, precision)


if __name__ == "__main__":
    main()
