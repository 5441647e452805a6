"""Time of a task's exact Fisher relative to a training epoch, to BackPACK and to torch.func, on one core.

Before timing, the three implementations are compared on the same weights and examples.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import evcl
from common import medians, paper_form, plain_network
from evcl._core.settings import Settings
from evcl.curvature import Sample, fisher
from evcl.methods import METHODS
from evcl.training import Run, TaskData

WIDTHS = [784, 256, 256, 2]
EXAMPLES, MEASURED, SLOW = 12_000, 5_000, 200  # number of examples: of the epoch, of the Fisher, of torch.func's Fisher


def by_torch_func(network: nn.Module, x: Tensor) -> Tensor:
    """[P]: the Fisher from one Jacobian per example, vectorised over a batch."""
    weights = dict(network.named_parameters())

    def log_p(weights: dict[str, Tensor], example: Tensor) -> Tensor:
        logits: Tensor = torch.func.functional_call(network, weights, (example.unsqueeze(0),))
        return logits[0].log_softmax(0)

    jacobian = torch.vmap(torch.func.jacrev(log_p), in_dims=(None, 0))
    total = torch.zeros(sum(w.numel() for w in weights.values()))
    for examples in x.split(50):
        with torch.no_grad():
            p = network(examples).softmax(1)
            parts = [j.flatten(2) for j in jacobian(weights, examples).values()]
            total += torch.cat([torch.einsum("bc,bcp->p", p, j.square()) for j in parts])
    return total / len(x)


def by_backpack(network: nn.Module) -> Callable[[Tensor], Tensor]:
    """[P]: the Fisher from BackPACK's sums of squared gradients, one backward pass per class, with the same weights."""
    from backpack import backpack, extend
    from backpack.extensions import SumGradSquared

    warnings.filterwarnings("ignore", "Full backward hook is firing")  # the first layer's input needs no gradient
    network = extend(copy.deepcopy(network))
    weights = list(network.parameters())

    def measure(x: Tensor) -> Tensor:
        total = [torch.zeros_like(w) for w in weights]
        for examples in x.split(2500):
            log_p = network(examples).log_softmax(1)
            targets = (log_p.detach().div(2).exp() * log_p).sum(0)
            for c, target in enumerate(targets):
                more = c + 1 < len(targets)
                with backpack(SumGradSquared(), retain_graph=more):
                    target.backward(retain_graph=more)
                for part, w in zip(total, weights, strict=True):
                    part += w.sum_grad_squared  # type: ignore[attr-defined]
        return torch.cat([part.flatten() for part in total]) / len(x)

    return measure


def check_same(name: str, ours: Tensor, theirs: Tensor) -> None:
    error = float((ours - theirs).abs().max() / ours.max())
    if not error < 1e-5:
        raise RuntimeError(f"{name} finds another Fisher: the largest difference is {error:.1e} of its largest entry")


def main() -> None:
    torch.set_num_threads(1)
    method = METHODS["evcl"]
    settings = paper_form("evcl", batch_size=256, epochs=1)
    run = Run(evcl.nn.mlp(WIDTHS[0], WIDTHS[1:-1]), method, [settings], [0], draw=True)
    source = torch.Generator().manual_seed(0)
    x = torch.rand(1, EXAMPLES, WIDTHS[0], generator=source)
    y = torch.randint(WIDTHS[-1], (1, EXAMPLES), generator=source)
    head = run.add_head(WIDTHS[-2], WIDTHS[-1])
    run.learn([TaskData(x[:, :512], y[:, :512], head)])
    mean, layout = run.network.posterior.mean, run.network.layout
    network = plain_network(WIDTHS)
    nn.utils.vector_to_parameters(mean[0], network.parameters())

    def ours(examples: int) -> Tensor:
        return fisher(Sample(run.network, mean, layout, [head], x[:, :examples], y[:, :examples]))[0]

    check_same("torch.func", ours(SLOW), by_torch_func(network, x[0, :SLOW]))
    few = Settings({**settings, "fisher_examples": 1})
    trained = Run(evcl.nn.mlp(WIDTHS[0], WIDTHS[1:-1]), method, [few], [0], draw=True)
    trained.add_head(WIDTHS[-2], WIDTHS[-1])
    trained.learn([TaskData(x[:, :512], y[:, :512], head)])
    runs: list[Callable[[], object]] = [
        lambda: trained.learn([TaskData(x, y, head)]),
        lambda: ours(MEASURED),
        lambda: by_torch_func(network, x[0, :SLOW]),
    ]
    missing = ""
    try:
        backpack = by_backpack(network)
        check_same("BackPACK", ours(MEASURED), backpack(x[0, :MEASURED]))
        runs.append(lambda: backpack(x[0, :MEASURED]))
    except ImportError as error:
        missing = f"not installed: pip install --no-deps backpack-for-pytorch einops unfoldNd ({error})"
    epoch, found, slow, *rest = medians(runs, 9)
    slow *= MEASURED / SLOW
    print(f"torch {torch.__version__}, one thread, 784-256-256, 2 classes; seconds, median of 9 rounds\n")
    print(f"an epoch of {EXAMPLES:,} examples   {epoch:.3f}")
    print(f"the Fisher of {MEASURED:,}          {found:.3f}   {found / epoch:.2f} epochs")
    for seconds in rest:
        print(f"the same by BackPACK           {seconds:.3f}   {seconds / found:.2f} times as long")
    if missing:
        print(f"the same by BackPACK           {missing}")
    print(f"the same by torch.func         {slow:.3f}   {slow / found:.0f} times as long (from {SLOW} examples)")


if __name__ == "__main__":
    main()
