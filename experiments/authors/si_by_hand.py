"""Synaptic intelligence in plain PyTorch, without this library's training: what does keeping Adam's state change?

Its authors (Zenke, Poole and Ganguli, 2017) keep Adam's moments from task to task on permuted MNIST; the library starts
them anew with each task. This program trains both, with everything else the same:

    python experiments/authors/si_by_hand.py --adam kept --seeds 3
    python experiments/authors/si_by_hand.py --adam new --seeds 3
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from statistics import mean, stdev

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evcl import benchmarks


def trained(seed: int, options: argparse.Namespace) -> float:
    """The mean test accuracy, in percent, after the last task."""
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tasks = benchmarks.get(options.benchmark, seed, options.tasks)
    sizes = [tasks[0].train.x.shape[1], *[options.width] * 2, 10]
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    network = nn.Sequential(*layers[:-1]).to(device)
    weights = list(network.parameters())
    adam = torch.optim.Adam(weights, lr=1e-3)
    omega = [torch.zeros_like(w) for w in weights]
    anchor = [w.detach().clone() for w in weights]
    for task in tasks:
        x, y = task.train.x.to(device), task.train.y.to(device)
        if options.adam == "new":
            adam = torch.optim.Adam(weights, lr=1e-3)
        path = [torch.zeros_like(w) for w in weights]
        for _ in range(options.epochs):
            for rows in torch.randperm(len(x), device=device).split(256):
                step(network, weights, adam, x[rows], y[rows], omega, anchor, path, options.strength)
        with torch.no_grad():
            for w, o, a, p in zip(weights, omega, anchor, path, strict=True):
                o.add_(p / ((w - a).square() + options.xi)).clamp_(min=0)
                a.copy_(w)
    with torch.no_grad():
        right = [(network(t.test.x.to(device)).argmax(1) == t.test.y.to(device)).float().mean() for t in tasks]
    return 100 * float(torch.stack(right).mean())


def step(
    network: nn.Module,
    weights: list[nn.Parameter],
    adam: torch.optim.Adam,
    x: Tensor,
    y: Tensor,
    omega: list[Tensor],
    anchor: list[Tensor],
    path: list[Tensor],
    c: float,
) -> None:
    """One step on L + c sum Omega (theta - theta*)^2; `path` adds up -g (theta' - theta), g the gradient of L alone."""
    grads = torch.autograd.grad(F.cross_entropy(network(x), y), weights)
    before = [w.detach().clone() for w in weights]
    for w, g, o, a in zip(weights, grads, omega, anchor, strict=True):
        w.grad = g + 2 * c * o * (w.detach() - a)
    adam.step()
    for w, g, b, p in zip(weights, grads, before, path, strict=True):
        p.sub_(g * (w.detach() - b))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adam", choices=["kept", "new"], default="kept")
    parser.add_argument("--benchmark", default="permuted-mnist")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--width", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--strength", type=float, default=0.1)
    parser.add_argument("--xi", type=float, default=0.1)
    options = parser.parse_args()
    found = [trained(seed, options) for seed in range(options.seeds)]
    spread = stdev(found) if len(found) > 1 else 0.0
    print(f"SI by hand, Adam {options.adam}, c {options.strength:g}: {mean(found):.2f} +- {spread:.2f} over {found}")


if __name__ == "__main__":
    main()
