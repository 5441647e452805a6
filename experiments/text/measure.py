"""MiniLM with LoRA on streams of texts: EVCL against naive LoRA, EWC on the product, VCL, replay and joint training.

    python experiments/field/run.py search bbc-task bbc-class mails --device cuda   # choose, on validation data
    python experiments/text/measure.py --device cuda                                # the results of README.md
    python experiments/text/measure.py --first 4 --length 32 --rows 60 --validation 0.2 --set lr=0.01   # for a CPU

A method has the settings that the search chose for it. With --set it has its defaults instead, and those.

Each run writes OUT/STREAM/METHOD/result.json, with `halves` in its config: whether the trained network still finds two
halves of one article more similar than halves of two (see `halves`). What is there already is not done again.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evcl import benchmarks, data, methods
from evcl.benchmarks import Benchmark, Examples
from evcl.experiments import Config, configure, write_result
from evcl.experiments.compare import chosen
from evcl.experiments.result import merge
from evcl.experiments.run import environment, result_of
from evcl.nn import LoRA, minilm, minilm_tokeniser, outputs
from evcl.nn.bert import BertTop, below
from evcl.training import Run, learn_stream

HERE = Path(__file__).resolve().parent
FIELD_FOLDER = HERE.parent / "field"
STREAMS = {
    "bbc-task": ("bbc-topics", "task"),
    "bbc-class": ("bbc-topics", "class"),
    "mails": ("mails", "domain"),
}
METHODS = ("evcl", "vcl", "ewc", "naive", "er", "joint")
SETTINGS: dict[str, object] = {"epochs": 10, "batch_size": 16}
SEEDS = (100,)
ARTICLES = 400  # whose halves are compared
CHUNK = 64  # texts that go through the lower layers at once


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)  # noqa: T201


class Texts:
    """The streams and their network, for adapters in the layers from `first` on."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.bert = args, minilm().to(args.device)

    def network(self) -> nn.Module:
        bert = minilm()
        return LoRA(rank=self.args.rank)(bert if self.args.first is None else BertTop(bert, self.args.first))

    def inputs(self, x: Tensor) -> Tensor:
        x = x[:, : self.args.length]
        if self.args.first is None:
            return x
        return torch.cat([below(self.bert, self.args.first, p.to(self.args.device)).cpu() for p in x.split(CHUNK)])

    def stream(self, name: str) -> Benchmark:
        benchmark, scenario = STREAMS[name]
        found = benchmarks.get(benchmark, validation=self.args.validation, scenario=scenario)
        tasks = [
            replace(
                task,
                train=self._shortened(task.train, self.args.rows),
                test=self._shortened(task.test, self.args.test_rows),
                validation=None if task.validation is None else self._shortened(task.validation, self.args.test_rows),
            )
            for task in found
        ]
        return Benchmark(benchmark, tasks, network=self.network)

    def _shortened(self, part: Examples, rows: int | None) -> Examples:
        """At most this many rows of each class, the first ones."""
        if rows is not None:
            own = [(part.labels == c).nonzero().flatten()[:rows] for c in part.labels.unique()]
            part = part.select(torch.cat(own).sort().values)
        return replace(part, inputs=self.inputs(part.inputs))

    def halves(self) -> tuple[Tensor, Tensor]:
        """The first half and the second half of some articles."""
        length = self.args.length
        whole = minilm_tokeniser()(data.load_texts("bbc")[0], 2 * length + 2)
        long = whole[(whole != 0).all(1)]
        some = long[:: max(1, len(long) // self.args.articles)][: self.args.articles]
        ends = some[:, :1], some[:, -1:]
        parts = some[:, 1 : length - 1], some[:, length + 1 : 2 * length - 1]
        first, second = (self.inputs(torch.cat([ends[0], part, ends[1]], 1)) for part in parts)
        return first, second


@torch.no_grad()
def similar(run: Run, parts: tuple[Tensor, Tensor], adapters: bool) -> list[float]:
    """For each replica: how often the two halves of an article are more similar than its first half and the second half
    of another article. With `adapters` False, of the network before any training.
    """
    network, mean = run.network, run.network.posterior.mean
    weights = mean if adapters else network.without_adapters(mean)
    a, b = (
        F.normalize(outputs(network, weights, network.layout, x.unsqueeze(0).to(mean), [], 64), dim=2) for x in parts
    )
    cosine = a @ b.mT  # [R, N, N]
    own = cosine.diagonal(dim1=1, dim2=2).unsqueeze(2)
    n = cosine.shape[1]
    wins = (own > cosine).double() + 0.5 * (own == cosine).double()
    return [float((each.sum() - 0.5 * n) / (n * (n - 1))) for each in wins]


def run_one(texts: Texts, stream: Benchmark, parts: tuple[Tensor, Tensor], config: Config, short: str) -> None:
    args, cells, scenario = texts.args, config.cells, STREAMS[short][1]
    run = Run(
        texts.network(),
        methods.get(config.method),
        [cell.settings for cell in cells],
        list(config.seeds),
        draw=True,
        device=args.device,
        precision=config.precision,
        allow_divergence=True,
    )
    start = time.perf_counter()
    found = learn_stream(run, [stream], infer=scenario != "task")
    seconds = round((time.perf_counter() - start) / len(cells), 1)
    after = similar(run, parts, adapters=True)
    before = similar(run, parts, adapters=False)[0]
    shape = {
        "network": "minilm_lora", "rank": args.rank, "first": args.first, "length": args.length, "rows": args.rows,
        "halves_before": before, "halves": after,
    }  # fmt: skip
    size, machine = run.memory_bytes(), environment(args.device)
    make = partial(result_of, found=found, seconds=seconds, machine=machine)
    cells = [replace(cell, tasks=len(stream), device=args.device, scenario=scenario) for cell in cells]
    results = [make(cell, r, trunk=shape, size=size) for r, cell in enumerate(cells)]
    whole = merge(results)
    folder = args.out / short / config.method
    folder.mkdir(parents=True, exist_ok=True)
    write_result(folder, whole)
    measured = {name: whole.measure(name) for name in ("average_accuracy", "forgetting", "ece")}
    words = [f"{name} {'-' if one.mean is None else f'{100 * one.mean:.2f}'}" for name, one in measured.items()]
    lasting = f"halves {100 * before:.1f} -> {100 * sum(after) / len(after):.1f}"
    say(f"{short} {config.method}: {', '.join(words)}, {lasting}, {seconds} s per seed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=list(STREAMS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seed-list", default="", help="separated by commas [those of field.toml]")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="for methods that have it")
    parser.add_argument("--validation", type=float, default=0.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default=None)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--first", type=int, default=None, help="the first layer with adapters; those below run once")
    parser.add_argument("--length", type=int, default=64, help="pieces of a text")
    parser.add_argument("--rows", type=int, default=None, help="texts per class and task to train [all]")
    parser.add_argument("--test-rows", type=int, default=None, help="texts per class and task to test [all]")
    parser.add_argument("--articles", type=int, default=ARTICLES, help="whose halves are compared")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    sys.path.append(str(FIELD_FOLDER))
    from field import PLAN

    texts = Texts(args)
    parts = texts.halves()
    wanted: dict[str, object] = dict(one.split("=", 1) for one in args.set)
    for short in args.streams:
        name = STREAMS[short][0]
        stream = texts.stream(short)
        for method in args.methods:
            if (args.out / short / method / "result.json").exists():
                continue
            if not wanted:
                config = chosen(PLAN, FIELD_FOLDER, short, method, args.device, args.precision)
            else:
                known = methods.get(method).known_settings
                given = {**SETTINGS, **{key: value for key, value in wanted.items() if key in known}}
                config = configure(name, method, "default", SEEDS, None, given, args.device, args.precision)
            if args.seed_list:
                config = replace(config, seeds=tuple(int(seed) for seed in args.seed_list.split(",")))
            run_one(texts, stream, parts, config, short)


if __name__ == "__main__":
    main()
