"""Time of a step with distillation relative to one without, on one core. Prints a table of ratios.

The step is in the last of five tasks of two classes, each with its own head, so four heads are distilled. `lwf` is
compared with `naive`, and `evcl` with itself at `distill` 0. The table also has the same distillation by autograd,
which in a chain of linear layers makes a second pass through the network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

import evcl
from common import medians, paper_form
from evcl._core.randomness import GeneratorNoise, generator
from evcl.methods import METHODS, Loss, Round
from evcl.methods.data import Minibatch
from evcl.methods.memories import narrowed
from evcl.nn import BayesianNetwork
from evcl.nn.chain import find_chain
from evcl.training import Pool, Run, Step, TaskData
from evcl.training.data import all_heads

BATCH, CLASSES, TASKS = 64, 2, 5


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(7), nn.Flatten(),
    )  # fmt: skip


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {  # inputs, features, steps per round
    "784-256-256": (lambda: evcl.nn.mlp(784, [256, 256]), (784,), 256, 200),
    "64-100": (lambda: evcl.nn.mlp(64, [100]), (64,), 100, 200),
    "convolution": (convolution, (1, 28, 28), 32, 10),
}


class Apart(Loss):
    """Any loss, computed by autograd."""

    def __init__(self, loss: Loss) -> None:
        self.loss, self.heads = loss, loss.heads

    def __call__(self, network: BayesianNetwork, batch: Minibatch) -> Tensor:
        return self.loss(network, batch)


def step(method: str, name: str, apart: bool = False, **given: float) -> Callable[[], object]:
    """A method's step in the middle of the last task."""
    if "std_rate" in METHODS[method].known_settings:
        given["std_rate"] = 0.01
    settings = paper_form(method, batch_size=BATCH, epochs=1, **given)
    make, inputs, features, _ = NETWORKS[name]
    run = Run(make(), METHODS[method], [settings], [0], draw=True)
    source = generator(0, "perf")
    for k in range(TASKS):
        run.add_head(features, CLASSES)
        x = torch.rand(1, 8 * BATCH, *inputs, generator=source)
        task = TaskData(x, torch.randint(CLASSES, x.shape[:2], generator=source), k, task=k)
        if k < TASKS - 1:
            run.learn([task])
    network, pool = run.network, Pool([task], run.classes)
    round_ = Round(TASKS - 1, [task], network, network.posterior, run.seen, run.seeds, run.likelihood)
    fit = next(run.method.learn(run.memory, round_, run.settings))
    losses = [Apart(loss) for loss in fit.losses] if apart else fit.losses
    part = network.layout.part(network.names_of(all_heads(pool, losses)))
    q = network.posterior.map(lambda t: network.layout.gather(t, part), part)
    terms = [narrowed(term, network.layout, part) for term in fit.terms]
    own = replace(fit, terms=terms, losses=losses)
    one = Step(network, q, own, run.settings, pool, find_chain(network, task.x))
    rows, noise = torch.arange(BATCH).unsqueeze(0), GeneratorNoise([generator(0, "perf")])
    return lambda: one(rows, noise)


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, batch {BATCH}; µs per step, median of 15 rounds\n")
    print(
        f"{'network':<14}{'method':<8}{'without':>9}{'distilled':>11}{'by autograd':>13}{'ratio':>8}{'by autograd':>13}"
    )
    for name, (*_, steps) in NETWORKS.items():
        for method, without in (("lwf", step("naive", name)), ("evcl", step("evcl", name, distill=0.0))):
            runs = [without, step(method, name), step(method, name, apart=True)]
            plain, taught, slow = (1e6 * seconds for seconds in medians(runs, 15, steps))
            times = f"{plain:>9.0f}{taught:>11.0f}{slow:>13.0f}"
            print(f"{name:<14}{method:<8}{times}{taught / plain:>8.2f}{slow / plain:>13.2f}")


if __name__ == "__main__":
    main()
