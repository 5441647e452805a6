"""Time of a training step relative to its bare matrix products, on one core. Prints a table of ratios.

The bare products of a step are, for each layer, two forward, two for the weight gradients and two for the input
gradients (none for the first layer). A custom term, differentiated by autograd, is measured too: EVCL's step with the
term relative to EVCL's step, and the term's gradient alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

import evcl
from common import BATCH, NETWORKS, medians, paper_form
from evcl._core.randomness import GeneratorNoise, generator
from evcl.methods import METHODS, Fit, Round, Term, autograd_gradients
from evcl.nn import Gaussian
from evcl.nn.chain import find_chain
from evcl.training import Pool, Run, Step, TaskData


def bare_products(widths: list[int], dtype: torch.dtype = torch.float32) -> Callable[[], None]:
    """The products of one step alone, into existing buffers."""
    products: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for layer, (i, o) in enumerate(pairwise(widths)):
        x, weight, delta = (torch.randn(*shape).to(dtype) for shape in ((BATCH, i), (o, i), (BATCH, o)))
        once = [(x, weight.mT, x.new_empty(BATCH, o)), (delta.mT, x, x.new_empty(o, i))]
        if layer > 0:
            once.append((delta, weight, x.new_empty(BATCH, i)))
        products += once * 2

    def run() -> None:
        for a, b, out in products:
            torch.mm(a, b, out=out)

    return run


@dataclass(frozen=True)
class Rounded:
    """A custom term: sum_p sqrt(1 + (mu_p - mu*_p)^2) + (log sigma_p - log sigma*_p)^4"""

    anchor: Gaussian

    def loss(self, q: Gaussian) -> Tensor:
        log_std, anchored = q.log_std, self.anchor.log_std
        assert log_std is not None
        assert anchored is not None
        moved = (1 + (q.mean - self.anchor.mean).square()).sqrt()
        return 1e-4 * (moved + (log_std - anchored).square().square()).sum(1)


def own_gradient(hidden: list[int], classes: int) -> Callable[[], object]:
    """The gradient of the custom term alone."""
    run = Run(evcl.nn.mlp(784, hidden), METHODS["evcl"], [paper_form("evcl")], [0], draw=True)
    run.add_head(hidden[-1], classes)
    q = run.network.posterior
    term = Rounded(q.snapshot())
    return lambda: autograd_gradients([term], q)


def step(
    method: str,
    hidden: list[int],
    classes: int,
    precision: str = "fp32",
    replicas: int = 1,
    more: Callable[[Gaussian], Sequence[Term]] = lambda posterior: (),
) -> Callable[[], object]:
    """A method's step in the middle of a second task; `more` makes additional terms."""
    settings = [paper_form(method, batch_size=BATCH, epochs=1)] * replicas
    run = Run(evcl.nn.mlp(784, hidden), METHODS[method], settings, range(replicas), draw=True, precision=precision)
    source = generator(0, "perf")
    x = torch.rand(1, 4 * BATCH, 784, generator=source)
    y = torch.randint(classes, (1, 4 * BATCH), generator=source)
    head = run.add_head(hidden[-1], classes)
    task = TaskData(x, y, head)
    run.learn([task])
    pool, network = Pool([task], run.classes), run.network
    round_ = Round(1, [task], network, network.posterior, run.seen, run.seeds, run.likelihood)
    terms = [*next(run.method.learn(run.memory, round_, run.settings)).terms, *more(network.posterior)]
    q, chain = network.posterior.map(torch.clone, network.layout), find_chain(network, x)
    one = Step(network, q, Fit([task], terms=terms), run.settings, pool, chain)
    rows = torch.arange(BATCH).expand(replicas, BATCH)
    noise = GeneratorNoise([generator(r, "perf") for r in range(replicas)])
    return lambda: one(rows, noise)


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, batch {BATCH}; ms per step, median of 9 rounds of 100 steps\n")
    print(
        f"{'network':<16}{'precision':<10}{'products':>9}{'evcl':>8}{'naive':>8}{'evcl/products':>15}{'evcl/naive':>12}"
    )
    for name, (hidden, classes) in NETWORKS.items():
        widths = [784, *hidden, classes]
        runs = [
            run
            for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
            for run in (
                bare_products(widths, dtype),
                step("evcl", hidden, classes, precision),
                step("naive", hidden, classes, precision),
            )
        ]
        times = [1e3 * seconds for seconds in medians(runs, 9, 100)]
        for precision, (products, ours, naive) in (("fp32", times[:3]), ("bf16", times[3:])):
            ratios = f"{ours / products:>15.2f}{ours / naive:>12.2f}"
            print(f"{name:<16}{precision:<10}{products:>9.2f}{ours:>8.2f}{naive:>8.2f}{ratios}")
        print(f"{'':<16}evcl in fp32 / in bf16: {times[1] / times[4]:.2f}")
        runs = [
            step("evcl", hidden, classes),
            own_gradient(hidden, classes),
            step("evcl", hidden, classes, more=lambda posterior: [Rounded(posterior.snapshot())]),
        ]
        plain, gradient, both = medians(runs, 300)  # in turn, so that the gradient is out of cache, as it is in a step
        parts = f"{1e3 * plain:.2f} + {1e3 * gradient:.2f}"
        print(f"{'':<16}with a user's own term: {1e3 * both:.2f}, evcl + its gradient: {parts}", end="")
        print(f", ratio {both / (plain + gradient):.2f}")


if __name__ == "__main__":
    main()
