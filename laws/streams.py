"""No tuning: random streams of classes, learned with the defaults, beside all tasks learned at once (`joint`).

A stream is drawn by its number: the ten classes of a data set in a random order, in groups of 2+2+2+2+2, 3+3+4 or 5+5.
Each method learns it with the preset `default`, or `--preset tuned` where that names settings for the data set's own
benchmark. Accuracies are per cent, on a tenth of each training set that is held out, or with `--test` on the test sets.

    python laws/streams.py --data mnist notmnist fashion cifar --streams 0 4 --methods evcl lwf ewc --device cuda

`--reversed` takes the benchmark's own pairs of classes in reversed order instead, with the numbers as seeds.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np

from evcl import benchmarks
from evcl.experiments import configure, execute_all, preset
from evcl.experiments.engines import Inline
from evcl.methods import METHODS

DATA = {
    "mnist": "split-mnist",
    "notmnist": "split-notmnist",
    "fashion": "split-fashion-mnist",
    "cifar": "split-cifar10",
    "digits": "split-digits",
}
SIZES = ((2, 2, 2, 2, 2), (3, 3, 4), (5, 5))


def groups(number: int) -> list[list[int]]:
    """The classes of each task of a stream."""
    source = np.random.default_rng([2026, number])
    classes, sizes = source.permutation(10), SIZES[number % len(SIZES)]
    return [part.tolist() for part in np.split(classes, np.cumsum(sizes)[:-1])]


def register(data: str, number: int, backwards: bool) -> str:
    """The stream as a benchmark; returns its name."""
    usual = benchmarks.BENCHMARKS[DATA[data]]
    pairs = [[8, 9], [6, 7], [4, 5], [2, 3], [0, 1]]
    wanted = tuple(tuple(group) for group in (pairs if backwards else groups(number)))
    name = f"{data}-{'reversed' if backwards else 'stream'}-{number}"

    def build(request: benchmarks.Request) -> benchmarks.Benchmark:
        return benchmarks.get(usual.name, request.seed, classes=wanted, data_dir=request.data_dir)

    benchmarks.register(
        benchmarks.Entry(name, "a random stream", build, False, len(wanted), len(wanted)), overwrite=True
    )
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=DATA, default=["mnist", "notmnist", "fashion", "cifar"])
    parser.add_argument("--streams", nargs=2, type=int, default=(0, 3), metavar=("FROM", "TO"), help="TO is left out")
    parser.add_argument("--methods", nargs="+", default=["evcl", "lwf", "ewc", "vcl", "naive"])
    parser.add_argument("--preset", default="default", choices=("default", "tuned"))
    parser.add_argument("--epochs", type=int, help="as the preset says if not given")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other settings, for all methods")
    parser.add_argument("--test", action="store_true", help="measure on the test sets")
    parser.add_argument("--reversed", action="store_true")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    methods = ["joint", *options.methods]
    for data in options.data:
        found: dict[str, list[float]] = {}
        for number in range(*options.streams):
            name = register(data, number, options.reversed)
            configs = []
            for method in methods:
                known = METHODS[method].known_settings
                given = preset(options.preset, DATA[data], METHODS[method])
                given |= {key: value for key, _, value in (one.partition("=") for one in options.set) if key in known}
                given |= {"epochs": options.epochs} if options.epochs else {}
                given |= {} if options.test else {"validation": 0.1}
                configs.append(configure(name, method, "default", [number], given=given, device=options.device))
            engine = None if configs[0].device == "cuda" else Inline  # other processes would not know the stream
            for i, result in execute_all(configs, lambda *_: None, engine=engine):
                found.setdefault(methods[i], []).append(100 * (result.average_accuracy.mean or 0.0))
            told = ", ".join(f"{method} {found[method][-1]:.2f}" for method in methods)
            print(f"{name} {'' if options.reversed else groups(number)}: {told}", flush=True)
        below = {m: [j - a for j, a in zip(found["joint"], found[m], strict=True)] for m in methods}
        print(f"\n| {data} | accuracy | below joint | at worst |\n| --- | ---: | ---: | ---: |")
        for method in methods:
            spread = f" ± {statistics.stdev(below[method]):.2f}" if len(below[method]) > 1 else ""
            mean, gap = statistics.mean(found[method]), statistics.mean(below[method])
            print(f"| {method} | {mean:.2f} | {gap:.2f}{spread} | {max(below[method]):.2f} |")
        print(flush=True)


if __name__ == "__main__":
    main()
