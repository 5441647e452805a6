"""How often `task="infer"` finds the right task, after a stream of tasks with one head each.

    python perf/infer.py [BENCHMARK ...] [--epochs E]

For each benchmark (split-digits, and split-mnist if its data is in the cache): the accuracy with the task known and
with `task="infer"`, how often the inferred task is right, and how often a guess would be. EVCL, seeds 0 to 2, all test
data.
"""

from __future__ import annotations

import argparse

import torch

import evcl
from evcl import data


def measure(name: str, seed: int, epochs: int | None) -> list[float]:
    """Accuracy with the task known and with it inferred, and the fraction of correctly inferred tasks."""
    benchmark = evcl.benchmarks.get(name, seed=seed)
    width = benchmark[0].train.x[0].numel()
    learner = evcl.EVCL(evcl.nn.mlp(width, benchmark.hidden), seed=seed)
    for task in benchmark:
        learner.learn(task, epochs=epochs)
    known = inferred = right = count = 0
    for task in benchmark:
        x, y = task.test
        found = learner.predictions(x, "infer")
        known += int((learner.predict(x, task.name) == y).sum())
        inferred += int((found.labels == y).sum())
        right += int((found.tasks == task.name).sum())
        count += len(y)
    return [known / count, inferred / count, right / count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("benchmark", nargs="*")
    parser.add_argument("--epochs", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    there = ["split-mnist"] if data.status("mnist").fetched else []
    for name in arguments.benchmark or ["split-digits", *there]:
        rows = torch.tensor([measure(name, seed, arguments.epochs) for seed in range(3)])
        known, inferred, right = (
            f"{100 * m:.1f} ± {100 * s:.1f}" for m, s in zip(rows.mean(0), rows.std(0), strict=True)
        )
        tasks = len(evcl.benchmarks.get(name, seed=0))
        guess = f"guessing: {100 / tasks:.0f}"
        print(f"{name}: accuracy {known} with the task, {inferred} without; the task is right for {right}% ({guess})")


if __name__ == "__main__":
    main()
