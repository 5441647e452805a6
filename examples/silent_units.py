"""How inactive ("silent") units defeat a diagonal Fisher: `python examples/silent_units.py`, 15 minutes on one core.

EVCL learns all tasks without distillation, first without and then with `fisher_spread`. The program prints the
accuracy on the second task (validation rows, predicted with the mean weights) when it was learned; after the last task;
and after the last task with some weights put back to their values before the third task: those of the first hidden
layer; those of the second; those into or out of hidden units that were 0 for every training example of the first two
tasks; and those of units that were 0 for at least 99% of these examples.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import torch
from torch import Tensor, nn

import evcl
from evcl.benchmarks import Task
from evcl.experiments import configure

SETTINGS = {  # the one recipe for the paper's benchmarks of version 0.1, without distillation
    "lr": 0.00252, "batch_size": 256, "epochs": 40, "tempering": 0.00839, "init_std": 0.001, "prior_std": 0.0495,
    "std_rate": 0.01, "predict_samples": 32, "strength": 230.0, "strength_scale": "examples", "fisher_scale": "task",
    "fisher_temperature": 16.6, "fisher_spread": 0.182, "distill": 0.0,
}  # fmt: skip
COLUMNS = (
    "learned", "after the last task", "layer 1 put back", "layer 2 put back", "silent units", "silent put back",
    "nearly silent units", "nearly put back",
)  # fmt: skip


def accuracy(network: nn.Module, weights: dict[str, Tensor], task: Task) -> float:
    network.load_state_dict(weights)
    with torch.no_grad():
        found = torch.tensor(task.classes)[network(task.held_out.x).argmax(1)]
    return 100 * float((found == task.held_out.y).double().mean())


def active(network: nn.Module, tasks: list[Task]) -> list[Tensor]:
    """For each unit of each hidden layer, the fraction of these tasks' training examples for which it is above 0."""
    found: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, __, output: found.append((output > 0).double().mean(0)))
        for layer in network.modules()
        if isinstance(layer, nn.ReLU)
    ]
    with torch.no_grad():
        network(torch.cat([task.train.x for task in tasks]))
    for hook in hooks:
        hook.remove()
    return found


def put_back(after: dict[str, Tensor], before: dict[str, Tensor], silent: list[Tensor]) -> dict[str, Tensor]:
    """The weights `after`, except that those into and out of the silent units are taken from `before`."""
    made = {name: weight.clone() for name, weight in after.items()}
    layers = [name.removesuffix("weight") for name in after if name.endswith("weight")]
    for units, into, from_them in zip(silent, layers[:-1], layers[1:], strict=True):
        for name in (f"{into}weight", f"{into}bias"):
            made[name][units] = before[name][units]
        made[f"{from_them}weight"][:, units] = before[f"{from_them}weight"][:, units]
    return made


def measure(benchmark: str, seed: int, given: dict[str, Any]) -> list[float]:
    """The columns: accuracies on the second task in per cent, and the numbers of silent units."""
    tasks = evcl.benchmarks.get(benchmark, seed, validation=0.1)
    settings = dict(configure(benchmark, "evcl", "default", given=SETTINGS | given).settings)
    del settings["validation"]
    learner = evcl.EVCL(evcl.nn.mlp(tasks.inputs, tasks.hidden), seed=seed, **settings)
    for task in tasks[:2]:
        learner.learn(task)
    network = learner.mean_network(tasks[1].name)
    before = {name: weight.clone() for name, weight in network.state_dict().items()}
    shares = active(network, list(tasks[:2]))
    for task in tasks[2:]:
        learner.learn(task)
    after = learner.mean_network(tasks[1].name).state_dict()
    first, second = [name for name in after if name.endswith("weight")][:2]
    each = [before, after, {**after, first: before[first]}, {**after, second: before[second]}]
    found = [accuracy(network, weights, tasks[1]) for weights in each]
    for most in (0.0, 0.01):
        silent = [share <= most for share in shares]
        found.append(float(sum(int(units.sum()) for units in silent)))
        found.append(accuracy(network, put_back(after, before, silent), tasks[1]))
    return found


def cell(values: tuple[float, ...]) -> str:
    mean = f"{statistics.mean(values):.1f}"
    return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmark", default="split-fashion-mnist", help="a benchmark with one head per task")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="epochs per task [as in SETTINGS]")
    parser.add_argument("--spread", type=float, nargs="+", help="values of fisher_spread [0 and that in SETTINGS]")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds must be at least 1, not {options.seeds}")
    torch.set_num_threads(1)
    print("|", " | ".join(["fisher_spread", *COLUMNS]), "|\n|", " | ".join(["---:"] * (1 + len(COLUMNS))), "|")
    for spread in options.spread or (0.0, SETTINGS["fisher_spread"]):
        given = {"fisher_spread": spread} | ({} if options.epochs is None else {"epochs": options.epochs})
        each = [measure(options.benchmark, seed, given) for seed in range(options.seeds)]
        print("|", " | ".join([str(spread), *map(cell, zip(*each, strict=True))]), "|", flush=True)


if __name__ == "__main__":
    try:
        main()
    except evcl.EvclError as error:
        sys.exit(f"silent_units.py: {error}")
