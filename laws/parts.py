"""What each part of EVCL adds: all parts, each part alone left out, each part alone, and the posterior by itself.

On random streams of classes (laws/streams.py), with a head per task and with one head for all (`--scenarios`), on
`--benchmarks`, with the numbers of `--streams` as seeds, and on tables, month by month
(experiments/months/generated.py). Accuracies and NLL are on a held-out tenth of each training
set, or with `--test` on the test sets; of tables, on new rows of all months. A gain is paired: over streams or seeds,
with all parts minus without this one, and the standard error of its mean.

    python laws/parts.py                                                     # digits: about a minute
    python laws/parts.py --data mnist cifar --streams 0 12 --device cuda --out parts.json --figure parts.svg
    python laws/parts.py --data digits --set posterior=kronecker --tables shop regions --seeds 100 101 102
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evcl.experiments import configure, execute_all
from evcl.experiments.engines import Inline
from evcl.methods import METHODS
from streams import DATA, register

OFF: dict[str, dict[str, Any]] = {
    "tempering": {"tempering": 1.0},
    "distillation": {"distill": 0.0},  # and forgetting, which is in force beside it
    "forgetting": {"forget": False},
    "task inference": {"one_softmax": True},
}
ALL, NONE = "all parts", "no part"
Scores = dict[str, dict[str, dict[str, float]]]  # what was learned -> row -> number or seed -> score


def rows() -> dict[str, dict[str, Any]]:
    """The settings of each row; a row 'X alone' has every other part off. Forgetting alone is not in force."""
    each: dict[str, dict[str, Any]] = {ALL: {}, NONE: {key: one for off in OFF.values() for key, one in off.items()}}
    each |= {f"without {part}": off for part, off in OFF.items()}
    for part in OFF.keys() - {"forgetting"}:
        each[f"{part} alone"] = {key: one for other in OFF.keys() - {part} for key, one in OFF[other].items()}
    return {name: each[name] for name in sorted(each, key=lambda name: (name != ALL, name.endswith("alone"), name))}


def of_streams(
    options: argparse.Namespace, given: Mapping[str, Any], data: str, scenario: str
) -> tuple[Scores, Scores]:
    configs, labels = [], []
    for number in range(*options.streams):
        name = register(data, number, False) if data in DATA else data
        for row, off in rows().items():
            settings = {**given, **off, **({} if options.test else {"validation": 0.1})}
            settings |= {"scenario": scenario} if scenario else {}
            settings |= {"epochs": options.epochs} if options.epochs else {}
            configs.append(configure(name, "evcl", "default", [number], given=settings, device=options.device))
            labels.append((row, str(number)))
    engine = None if configs[0].device == "cuda" else Inline  # other processes do not have the streams registered
    accuracy: dict[str, dict[str, float]] = {row: {} for row in rows()}
    nll: dict[str, dict[str, float]] = {row: {} for row in rows()}
    for i, result in execute_all(configs, lambda *_: None, engine=engine):
        row, seed = labels[i]
        accuracy[row][seed] = round(100 * (result.average_accuracy.mean or 0.0), 3)
        nll[row][seed] = round(result.nll.mean or 0.0, 5)
    name = f"{data}, {scenario}".removesuffix(", ")
    return {name: accuracy}, {name: nll}


def of_tables(options: argparse.Namespace, given: Mapping[str, Any], table: str) -> tuple[Scores, Scores]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "experiments" / "months"))
    import generated
    import numpy as np
    import pandas as pd

    from evcl import tables

    accuracy: dict[str, dict[str, float]] = {row: {} for row in rows()}
    nll: dict[str, dict[str, float]] = {row: {} for row in rows()}
    for seed in options.seeds:
        months = generated.stream(table, seed)
        for row, off in rows().items():
            with tempfile.TemporaryDirectory() as folder:
                model, out, each = Path(folder) / "m.safetensors", Path(folder) / "out.csv", []
                first = {"target": "label", "seed": seed, "settings": {**given, **off}}
                for i, month in enumerate(months):
                    data = Path(folder) / f"{i}.csv"
                    month.train.to_csv(data, index=False)
                    tables.learn(model, data, **(first if i == 0 else {}), epochs=options.epochs)
                for i, month in enumerate(months):
                    data = Path(folder) / f"test {i}.csv"
                    month.test.to_csv(data, index=False)
                    tables.predict(model, data, out)
                    predicted, truth = pd.read_csv(out), month.test["label"].to_numpy()
                    right = [predicted.at[i, f"probability_{label}"] for i, label in enumerate(truth)]
                    each.append(
                        (100 * (predicted["prediction"] == truth).mean(), -np.log(np.maximum(right, 1e-6)).mean())
                    )
            accuracy[row][str(seed)] = round(statistics.mean(float(one) for one, _ in each), 3)
            nll[row][str(seed)] = round(statistics.mean(float(one) for _, one in each), 5)
    return {f"table {table}": accuracy}, {f"table {table}": nll}


def gain(own: Mapping[str, Mapping[str, float]], part: str) -> tuple[float, float]:
    """The mean of what a part adds to the others, and its standard error."""
    apart = [own[ALL][key] - own[f"without {part}"][key] for key in own[ALL]]
    error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else float("nan")
    return statistics.mean(apart), error


def printed(
    name: str, accuracy: Mapping[str, Mapping[str, float]], nll: Mapping[str, Mapping[str, float]]
) -> Iterator[str]:
    yield f"\n| {name} | accuracy | NLL | the part adds | to the NLL |\n| --- | ---: | ---: | ---: | ---: |"
    for row in rows():
        cells = [f"{statistics.mean(accuracy[row].values()):.2f}", f"{statistics.mean(nll[row].values()):.3f}", "", ""]
        part = row.removeprefix("without ")
        if part in OFF:
            cells[2:] = ["{:+.2f} ± {:.2f}".format(*gain(accuracy, part)), "{:+.3f} ± {:.3f}".format(*gain(nll, part))]
        yield f"| {row} | {' | '.join(cells)} |"


def draw(found: Scores, path: Path) -> None:
    """What each part adds on each stream, with two standard errors."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 0.6 + 0.9 * len(OFF)), layout="constrained")
    height = 0.8 / len(found)
    for i, (name, own) in enumerate(found.items()):
        gains = [gain(own, part) for part in OFF]
        places = [k + height * (i - (len(found) - 1) / 2) for k in range(len(OFF))]
        axes.barh(places, [one[0] for one in gains], height, xerr=[2 * one[1] for one in gains], label=name)
    axes.set_yticks(range(len(OFF)), list(OFF))
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("percentage points of accuracy that the part adds to all others")
    axes.legend(fontsize="small")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", choices=DATA, default=["digits"])
    parser.add_argument("--benchmarks", nargs="*", default=[], help="such as permuted-mnist")
    parser.add_argument("--scenarios", nargs="+", choices=("task", "domain", "class"), default=["task", "class"])
    parser.add_argument("--streams", nargs=2, type=int, default=(0, 3), metavar=("FROM", "TO"), help="TO is excluded")
    parser.add_argument("--tables", nargs="*", default=[], help="streams of experiments/months/generated.py")
    parser.add_argument("--seeds", nargs="+", type=int, default=[100, 101, 102], help="of the tables")
    parser.add_argument("--epochs", type=int, help="default: as in the preset")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other settings, such as posterior")
    parser.add_argument("--test", action="store_true", help="measure on the test sets")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="JSON file to save every accuracy and NLL in")
    parser.add_argument("--figure", type=Path, help="PNG or SVG file of what each part adds")
    options = parser.parse_args()
    given = {key: value for key, _, value in (one.partition("=") for one in options.set)}
    if unknown := given.keys() - METHODS["evcl"].known_settings.keys():
        parser.error(f"evcl has no setting {', '.join(sorted(unknown))}")
    accuracy: Scores = {}
    nll: Scores = {}
    learned = [("stream", data, scenario) for data in options.data for scenario in options.scenarios]
    learned += [("stream", benchmark, "") for benchmark in options.benchmarks]
    for kind, name, scenario in [*learned, *(("table", table, "") for table in options.tables)]:
        found = of_streams(options, given, name, scenario) if kind == "stream" else of_tables(options, given, name)
        accuracy, nll = accuracy | found[0], nll | found[1]
        (one,) = found[0]
        print("\n".join(printed(one, accuracy[one], nll[one])), flush=True)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            about = {"streams": list(options.streams), "test": options.test, "settings": given}
            options.out.write_text(json.dumps({**about, "accuracy": accuracy, "nll": nll}, indent=1) + "\n", "utf-8")
    if options.figure:
        draw(accuracy, options.figure)


if __name__ == "__main__":
    main()
