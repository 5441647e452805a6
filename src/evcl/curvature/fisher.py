"""The diagonal Fisher information, example by example.

    F_p = 1/n sum_b sum_c w_bc (d log p(c|x_b) / d theta_p)^2

`exact`: every class, w = p(c|x_b). `sampled`: one label drawn from p(.|x_b). `empirical`: the true label, which is not
the Fisher of the model but what much code calls by that name. The square is taken of each example's gradient, never
of a batch's mean: examples do not mix, so one backward pass of their sum gives each example's own output gradients,
and each layer turns those into its sum of squares. An example that counts for u in the loss counts for u here: what is
protected is what was minimised.

A diagonal does not see what two weights do together. The weight from a unit that was silent in a task has a Fisher of
0, and so has every weight into that unit: a later task may wake it up and send it anywhere, and each of the two changes
is harmless and both are not. `spread` gives each weight a part of what its neighbours have: the weights from the same
input and, where that input is itself learned and may change, the weights into the same unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.ranks import Ranks
from evcl._core.settings import ELASTIC
from evcl.likelihoods import CATEGORICAL, Likelihood
from evcl.nn import BayesianLayer, BayesianNetwork, Layout, head_names

KINDS = ELASTIC["fisher"].choices
CHUNK_NUMBERS, CHUNK_ROWS = 2_000_000, (16, 1000)  # inputs that go through the network at once


def fisher(
    network: BayesianNetwork,
    mean: Tensor,
    layout: Layout,
    x: Tensor,
    y: Tensor,
    heads: Sequence[int],
    kind: str = "exact",
    generators: Sequence[torch.Generator] | None = None,
    chunk: int | None = None,
    temperature: Tensor | float = 1.0,
    weights: Tensor | None = None,
    ranks: Ranks | None = None,
    spread: Tensor | float = 0.0,
    likelihood: Likelihood = CATEGORICAL,
) -> Tensor:
    """[R, P]: the Fisher at the weights `mean` [R, P] for examples x [R, n, ...], labels y [R, n].

    `layout` names the weights that count. `generators`, one a replica, are used by `sampled` alone; `chunk` examples
    go through the network at once. `temperature` ([R, 1], or one for all) divides the logits. `weights` [R, n] are what
    the examples count for; None: 1. Of several processes (`ranks`), each with all of this, each takes its share of the
    examples. `spread` ([R, 1], or one for all) times the means of a weight's neighbours are added to it.
    """
    if kind not in KINDS:
        raise EvclError(f"fisher must be one of {', '.join(KINDS)}, not {kind!r}")
    if chunk is None:
        chunk = min(max(CHUNK_NUMBERS // x[:, :1].numel(), CHUNK_ROWS[0]), CHUNK_ROWS[1])
        chunk = CHUNK_ROWS[1] if x.is_cuda else chunk  # few and long kernels; a CPU wants what fits its cache
    if ranks is not None and kind != "sampled":  # whose draws depend on the chunks
        chunk = min(chunk, -(-x.shape[1] // ranks.size))
    network.bind(mean, None, layout)
    network.weights.noise = None
    total = torch.zeros_like(mean)
    parts = layout.views(total)
    counts = torch.ones_like(y, dtype=x.dtype) if weights is None else weights
    seen: dict[BayesianLayer, bool] = {}  # the layers that were called, and whether their inputs are learned
    for turn, (xs, ys, us) in enumerate(zip(*(t.split(chunk, 1) for t in (x, y, counts)), strict=True)):
        if ranks is not None and turn % ranks.size != ranks.rank:
            if kind == "sampled":  # the next draws are those of one process
                classes = sum(layout.shapes[head_names(k)["bias"]][0] for k in heads)
                likelihood.skip_labels(mean.new_empty(*ys.shape, classes), generators)
            continue
        calls, targets = recorded(network, xs, ys, us, heads, kind, generators, temperature, likelihood)
        for call in calls:
            seen[call.layer] = call.learned or seen.get(call.layer, False)
        for deltas in output_gradients(calls, targets):
            _add_squares(parts, calls, deltas, ys.shape[1])
    if isinstance(spread, Tensor) or spread > 0:
        _spread(parts, seen, spread)
    if ranks is not None:
        ranks.sum_(total)
    return total / x.shape[1]


class Call(NamedTuple):
    layer: BayesianLayer
    x: Tensor
    output: Tensor
    learned: bool  # whether x depends on weights


def recorded(
    network: BayesianNetwork,
    x: Tensor,
    y: Tensor,
    weights: Tensor,
    heads: Sequence[int],
    kind: str,
    generators: Sequence[torch.Generator] | None,
    temperature: Tensor | float,
    likelihood: Likelihood,
) -> tuple[list[Call], list[Tensor]]:
    """One pass of examples [R, n, ...]: every call of a layer with weights, and the likelihood's targets."""
    calls, handles = _record(network)
    try:
        with torch.enable_grad():
            outputs = network.logits(x.flatten(0, 1), heads).unflatten(0, y.shape[:2])
            return calls, likelihood.fisher_targets(outputs, y, weights, kind, generators, temperature)
    finally:
        for handle in handles:
            handle.remove()


def output_gradients(calls: Sequence[Call], targets: Sequence[Tensor]) -> Iterator[tuple[Tensor | None, ...]]:
    """For each target, its gradients with respect to the outputs of these calls."""
    outputs = [call.output for call in calls]
    for i, target in enumerate(targets):
        yield torch.autograd.grad(target, outputs, retain_graph=i + 1 < len(targets), allow_unused=True)


def _record(network: BayesianNetwork) -> tuple[list[Call], list[torch.utils.hooks.RemovableHandle]]:
    """Note the input and output of every layer with weights, each time it is called."""
    calls: list[Call] = []

    def note(layer: BayesianLayer, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """The network goes on with a copy: an activation in place would change what is kept here."""
        calls.append(Call(layer, args[0].detach().clone(), output, args[0].requires_grad))
        return output.clone()

    layers = [layer for layer in network.bayesian_layers() if layer.names]
    return calls, [layer.register_forward_hook(note) for layer in layers]


@torch.no_grad()
def _add_squares(parts: dict[str, Tensor], calls: list[Call], deltas: Sequence[Tensor | None], examples: int) -> None:
    """Add sum_b g_b^2 of each weight; a weight used several times has its gradients summed before the square."""
    uses: dict[str, list[tuple[BayesianLayer, str, Tensor, Tensor]]] = {}
    for (layer, x, _, _), delta in zip(calls, deltas, strict=True):
        if delta is None:
            continue
        x, delta = layer.unfold(x), layer.unfold(delta)
        if x.shape[1] != examples * layer.fold:
            raise EvclError(
                f"{type(layer).__name__} {list(layer.names.values())} saw {x.shape[1]} rows for {examples} examples: "
                "keep the batch as the first axis, and positions behind it, so that the Fisher can tell examples apart"
            )
        for parameter, name in layer.names.items():
            if name in parts:
                uses.setdefault(name, []).append((layer, parameter, x, delta))
    for name, found in uses.items():
        layer, parameter, x, delta = found[0]
        if len(found) == 1 and layer.fold == 1:
            part = layer.part(parts, parameter)
            assert part is not None
            part += layer.square_sum(parameter, x, delta)
            continue
        rows = max(1, min(u.rows_at_once(p, a, d) // u.fold for u, p, a, d in found))
        for start in range(0, examples, rows):
            gradients = [_gradient(*use, slice(start, start + rows)) for use in found]
            whole = parts[name].new_zeros(*gradients[0].shape[:2], *parts[name].shape[1:])
            for (layer, parameter, _, _), gradient in zip(found, gradients, strict=True):
                part = layer.part({name: whole.flatten(0, 1)}, parameter)
                assert part is not None
                part += gradient.flatten(0, 1)
            parts[name] += whole.square().sum(1)


def _spread(parts: dict[str, Tensor], layers: dict[BayesianLayer, bool], share: Tensor | float) -> None:
    """Add to each weight its share of what its neighbours have; weights used several times have it once, as the first
    of the layers that use them.
    """
    uses: dict[tuple[str, int, int], tuple[BayesianLayer, str, bool]] = {}
    for layer, learned in layers.items():
        for parameter, name in layer.names.items():
            part = layer.part(parts, parameter) if name in parts else None
            if part is None or part.dim() == 1:  # a number by itself has no neighbours
                continue
            length, start = part.shape[1] // layer.pieces, layer.rows.get(parameter, slice(0)).start or 0
            for piece in range(start, start + part.shape[1], length):
                first, known, before = uses.get((name, piece, length), (layer, parameter, False))
                uses[name, piece, length] = first, known, before or learned
    found = []
    for (name, start, length), (layer, parameter, learned) in uses.items():
        part = parts[name][:, start : start + length]
        found.append((part, layer.neighbours(parameter, part, learned)))
    for part, neighbours in found:
        part += neighbours * (share.view(-1, *[1] * (part.dim() - 1)) if isinstance(share, Tensor) else share)


def _gradient(layer: BayesianLayer, parameter: str, x: Tensor, delta: Tensor, piece: slice) -> Tensor:
    """The gradients [R, b, *shape] of a piece of the examples, each summed over its rows."""
    rows = slice(piece.start * layer.fold, piece.stop * layer.fold)
    gradient = layer.example_gradient(parameter, x[:, rows], delta[:, rows])
    return gradient if layer.fold == 1 else gradient.unflatten(1, (-1, layer.fold)).sum(2)
