"""What silent units do to a diagonal Fisher: `python examples/silent_units.py`, 12 minutes on one core.

EVCL learns three tasks with the preset `recipe`, without and with `fisher_spread`. Then the second task is asked for
again (its validation rows, by the means of the weights): as it was learned, after the third, and after the third with
the weights of one layer as they were before it.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from torch import nn

import evcl
from evcl.experiments import configure

torch.set_num_threads(1)


def accuracy(network: nn.Module, task: evcl.benchmarks.Task) -> float:
    examples = task.held_out
    with torch.no_grad():
        found = torch.tensor(task.classes)[network(examples.x).argmax(1)]
    return 100 * float((found == examples.y).double().mean())


def measure(benchmark: str, seed: int, given: dict[str, float]) -> list[float]:
    """Accuracy on the second task: learned; after the third; with each hidden layer put back."""
    tasks = evcl.benchmarks.get(benchmark, seed, tasks=3, validation=0.1)
    settings = dict(configure(benchmark, "evcl", "recipe", given=given).settings)
    del settings["validation"]
    torch.manual_seed(seed)
    learner = evcl.EVCL(evcl.nn.mlp(tasks.inputs, tasks.hidden), seed=seed, **settings)
    before = None
    for task in tasks:
        learner.learn((task.train.x, task.train.y), task=task.name)
        if task is tasks[1]:
            before = learner.mean_network(task.name)
    assert before is not None
    after = learner.mean_network(tasks[1].name)
    found = [accuracy(before, tasks[1]), accuracy(after, tasks[1])]
    weights, old = after.state_dict(), before.state_dict()
    for name in [name for name in weights if name.endswith("weight")][: len(tasks.hidden)]:
        after.load_state_dict({**weights, name: old[name]})
        found.append(accuracy(after, tasks[1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmark", default="split-fashion-mnist", help="a split benchmark")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="of each task, as the preset says if not given")
    options = parser.parse_args()
    layers = len(evcl.benchmarks.get(options.benchmark, 0, tasks=3).hidden)
    columns = ["fisher_spread", "learned", "after the third task", *(f"layer {i + 1} put back" for i in range(layers))]
    print("|", " | ".join(columns), "|\n|", " | ".join(["---:"] * len(columns)), "|")
    usual = configure(options.benchmark, "evcl", "recipe").settings.fisher_spread
    for spread in (0.0, usual):
        given = {"fisher_spread": spread} | ({} if options.epochs is None else {"epochs": options.epochs})
        each = [measure(options.benchmark, seed, given) for seed in range(options.seeds)]
        cells = [cell(values) for values in zip(*each, strict=True)]
        print("|", " | ".join([str(spread), *cells]), "|", flush=True)


def cell(values: tuple[float, ...]) -> str:
    mean = f"{statistics.mean(values):.1f}"
    return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else mean


if __name__ == "__main__":
    main()
