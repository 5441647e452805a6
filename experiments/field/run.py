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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from field import BENCHMARKS, FIELD, HERE, PLAN, SCENARIOS, methods_on, search_of, searched, stream_of

from evcl import benchmarks, methods
from evcl._core.files import write_atomically
from evcl._core.settings import Settings
from evcl.experiments import Config, configure
from evcl.experiments.compare import add_options, prepare, say, search, test
from evcl.experiments.run import network
from evcl.experiments.search import named_tasks, trials
from evcl.training import Run, learn_stream

ROWS = 512  # enough to keep as many examples as with a whole task


def memory(folder: Path, benchmark: str, wanted: Sequence[str]) -> None:
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
    parser.add_argument("command", choices=("search", "test", "memory"))
    parser.add_argument(
        "benchmarks", nargs="*", metavar="benchmark", help=f"of {', '.join([*BENCHMARKS, *SCENARIOS])} [all]"
    )
    parser.add_argument("--methods", nargs="+", default=["fast", "slow"], help="names, fast or slow [fast slow]")
    add_options(parser, HERE)
    args = parser.parse_args(words)
    where = prepare(args)
    asked = {method for name in args.methods for method in FIELD.get(name, [name])}
    for benchmark in args.benchmarks or [*BENCHMARKS, *SCENARIOS]:
        wanted = [method for method in methods_on(benchmark) if method in asked]
        if args.command == "memory":
            memory(args.folder, benchmark, wanted)
        else:
            (search if args.command == "search" else test)(PLAN, args.folder, benchmark, wanted, *where)


if __name__ == "__main__":
    main()
