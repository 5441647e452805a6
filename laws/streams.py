"""The defaults should need no tuning: random streams of classes, compared with learning all tasks at once (`joint`).

The number of a stream is its seed: the ten classes of a data set in random order, in groups of 2+2+2+2+2, 3+3+4 or 5+5.
`--methods` use their defaults, those of `--alone` too but for distill=0 and one_softmax=true: the posterior alone.
Methods of `--tuned` have the preset `tuned` of the data set's own benchmark. Accuracies are in per cent, on a held-out
tenth of each training set, or with `--test` on the test sets.

    python laws/streams.py --streams 0 4 --methods evcl naive --tuned lwf ewc --device cuda
    python laws/streams.py --test --streams 2000 2012 --tuned lwf ewc --out experiments/paper/results/laws/streams.json

`--reversed` uses the benchmark's pairs of classes in reversed order instead, with the numbers as seeds. `--out` saves
every accuracy and NLL; the tables in RESULTS.md come from there.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np

from evcl import benchmarks
from evcl._core.files import in_lines
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
ALONE = {"distill": 0.0, "one_softmax": True}
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


def learn_all(options: argparse.Namespace, data: str) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The accuracy and the NLL of each method on each stream of a data set."""
    numbers = range(*options.streams)
    methods = [(m, "default") for m in ("joint", *options.methods)] + [(m, "alone") for m in options.alone]
    methods += [(m, "tuned") for m in options.tuned]
    configs, labels = [], []
    for number in numbers:
        name = register(data, number, options.reversed)
        for method, kind in methods:
            known = METHODS[method].known_settings
            given = preset("default" if kind == "alone" else kind, DATA[data], METHODS[method])
            given |= {key: value for key, value in ALONE.items() if kind == "alone" and key in known}
            given |= {key: value for key, _, value in (one.partition("=") for one in options.set) if key in known}
            given |= {"epochs": options.epochs} if options.epochs else {}
            given |= {} if options.test else {"validation": 0.1}
            configs.append(configure(name, method, "default", [number], given=given, device=options.device))
            labels.append((method if kind == "default" else f"{method}, {kind}", number))
    engine = None if configs[0].device == "cuda" else Inline  # other processes do not have the streams registered
    found: dict[str, list[float]] = {label: [0.0] * len(numbers) for label, _ in labels}
    nll: dict[str, list[float]] = {label: [0.0] * len(numbers) for label, _ in labels}
    for i, result in execute_all(configs, lambda *_: None, engine=engine):
        label, number = labels[i]
        found[label][number - numbers.start] = round(100 * (result.average_accuracy.mean or 0.0), 3)
        nll[label][number - numbers.start] = round(result.nll.mean or 0.0, 5)
    return found, nll


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=DATA, default=["mnist", "notmnist", "fashion", "cifar"])
    parser.add_argument("--streams", nargs=2, type=int, default=(0, 3), metavar=("FROM", "TO"), help="TO is excluded")
    parser.add_argument("--methods", nargs="*", default=["evcl", "naive"], help="methods that use their defaults")
    parser.add_argument("--alone", nargs="*", default=[], metavar="METHOD", help="methods without their parts")
    parser.add_argument("--tuned", nargs="*", default=[], metavar="METHOD", help="methods that use tuned settings")
    parser.add_argument("--epochs", type=int, help="default: as in the preset")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other settings, for all methods")
    parser.add_argument("--test", action="store_true", help="measure on the test sets")
    parser.add_argument("--reversed", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="JSON file to save every accuracy in")
    options = parser.parse_args()
    kept: dict[str, dict[str, list[float]]] = {}
    nlls: dict[str, dict[str, list[float]]] = {}
    for data in options.data:
        found, nlls[data] = learn_all(options, data)
        kept[data] = found
        print(f"\n| {data} | accuracy | below joint | at worst | NLL |\n| --- | ---: | ---: | ---: | ---: |")
        for label, own in found.items():
            below = [j - a for j, a in zip(found["joint"], own, strict=True)]
            spread = f" ± {statistics.stdev(below):.2f}" if len(below) > 1 else ""
            mean, gap = statistics.mean(own), statistics.mean(below)
            nll = statistics.mean(nlls[data][label])
            print(f"| {label} | {mean:.2f} | {gap:.2f}{spread} | {max(below):.2f} | {nll:.3f} |", flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        about = {"streams": list(options.streams), "test": options.test, "reversed": options.reversed}
        options.out.write_text(f"{in_lines({**about, 'accuracy': kept, 'nll': nlls}, 3)}\n", "utf-8")


if __name__ == "__main__":
    main()
