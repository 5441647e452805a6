"""The exact Fisher of a task against a training epoch of it, and against a loop over torch.func, on one core."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import evcl
from evcl.curvature import fisher
from evcl.methods import METHODS
from evcl.nn import head_names
from evcl.settings import Settings, resolve
from evcl.training import Run, TaskData

EXAMPLES, MEASURED, SLOW = 12_000, 5_000, 200  # of the epoch, of the Fisher, of the loop


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def loop(network: torch.nn.Module, weights: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """The Fisher by torch.func: a jacobian an example, vectorised over a batch."""
    names = head_names(0)
    trunk = {name: w for name, w in weights.items() if name not in names.values()}
    head = {key: weights[name] for key, name in names.items()}

    def log_p(trunk: dict[str, Tensor], head: dict[str, Tensor], example: Tensor) -> Tensor:
        h = torch.func.functional_call(network, trunk, (example.unsqueeze(0),))
        return torch.nn.functional.linear(h, head["weight"], head["bias"])[0].log_softmax(0)

    jacobian = torch.vmap(torch.func.jacrev(log_p, argnums=(0, 1)), in_dims=(None, None, 0))
    total: dict[str, Tensor] = {}
    for examples in x.split(50):
        p = torch.vmap(log_p, in_dims=(None, None, 0))(trunk, head, examples).exp()
        for part in jacobian(trunk, head, examples):
            for name, j in part.items():
                found = (p.view(*p.shape, *[1] * (j.dim() - 2)) * j.square()).sum((0, 1))
                total[name] = total.get(name, 0) + found
    return total


def main() -> None:
    torch.set_num_threads(1)
    method = METHODS["evcl"]
    settings = resolve("evcl", method.known_settings, {"batch_size": 256, "epochs": 1})
    network = evcl.nn.mlp(784, [256, 256])
    run = Run(network, method, [settings], [0], draw=True)
    source = torch.Generator().manual_seed(0)
    x = torch.rand(1, EXAMPLES, 784, generator=source)
    y = torch.randint(2, (1, EXAMPLES), generator=source)
    head = run.add_head(256, 2)
    run.train([TaskData(x[:, :512], y[:, :512], head)])
    mean, layout = run.network.posterior.mean, run.network.layout
    weights = {name: view[0] for name, view in layout.views(mean).items()}
    few = Settings({**settings, "fisher_examples": 1})
    rounds = []
    for _ in range(5):
        rounds.append(
            [
                seconds(lambda: run.train([TaskData(x, y, head)], few)),
                seconds(lambda: fisher(run.network, mean, layout, x[:, :MEASURED], y[:, :MEASURED], [head])),
                seconds(lambda: loop(network, weights, x[0, :SLOW])) * MEASURED / SLOW,
            ]
        )
    epoch, ours, slow = (statistics.median(column) for column in zip(*rounds, strict=True))
    print(f"torch {torch.__version__}, one thread, 784-256-256, 2 classes; seconds, median of 5 rounds\n")
    print(f"an epoch of {EXAMPLES:,} examples   {epoch:.2f}")
    print(f"the Fisher of {MEASURED:,}          {ours:.2f}   {ours / epoch:.2f} epochs")
    print(f"the same by torch.func         {slow:.2f}   {slow / ours:.0f} times as long (from {SLOW} examples)")


if __name__ == "__main__":
    main()
