"""The diagonal Fisher information, from per-example gradients.

    F_p = 1/n sum_b sum_c w_bc (d log p(c|x_b) / d theta_p)^2

`exact`: all classes, w = p(c|x_b). `sampled`: one label drawn from p(.|x_b). `empirical`: the true label; this is not
the Fisher of the model, although much code calls it that. The gradient of each example is squared, never the mean
gradient of a batch. Because examples do not affect each other, one backward pass of their sum gives the output
gradients of each example, from which each layer computes its sum of squares. An example with weight u in the loss has
weight u here too, so that what is protected is what was minimised.

A diagonal misses the joint effect of two weights. If a unit was inactive in a task, the weights out of it have Fisher
0, and so have all weights into it. A later task may activate the unit and change the weights out of it: either change
alone is harmless, but both together are not. `spread` adds to each weight a fraction of the Fisher of its neighbours:
the weights from the same input and, if that input is itself learned and may change, the weights into the same unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.ranks import Ranks
from evcl._core.settings import ELASTIC
from evcl.likelihoods import CATEGORICAL, Likelihood
from evcl.nn import BayesianLayer, BayesianNetwork, Layout, head_names

KINDS = ELASTIC["fisher"].choices
CHUNK_NUMBERS, CHUNK_ROWS = (
    2_000_000,
    (16, 1000),
)  # input values, and limits of the examples, that go through the network at once


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
    """[R, P]: the Fisher at the weights `mean` [R, P] for examples x [R, n, ...] with labels y [R, n].

    `layout` names the weights to include. `generators`, one per replica, are used only by `sampled`. `chunk` examples
    go through the network at once. `temperature` ([R, 1], or one number) divides the logits. `weights` [R, n] are the
    weights of the examples; None: all 1. With several processes (`ranks`), all of which pass the same arguments, each
    computes its share of the examples. `spread` ([R, 1], or one number) times the mean Fisher of a weight's neighbours
    is added to its own.
    """
    if kind not in KINDS:
        raise EvclError(f"fisher must be one of {', '.join(KINDS)}, not {kind!r}")
    if chunk is None:
        chunk = min(max(CHUNK_NUMBERS // x[:, :1].numel(), CHUNK_ROWS[0]), CHUNK_ROWS[1])
        chunk = CHUNK_ROWS[1] if x.is_cuda else chunk  # few, long kernels; on a CPU, a chunk that fits its cache
    if ranks is not None and kind != "sampled":  # the draws of `sampled` depend on the chunks
        chunk = min(chunk, -(-x.shape[1] // ranks.size))
    network.bind(mean, None, layout)
    network.weights.noise = None
    total = torch.zeros_like(mean)
    parts = layout.views(total)
    counts = torch.ones_like(y, dtype=x.dtype) if weights is None else weights
    seen: dict[BayesianLayer, bool] = {}  # the layers that were called, and whether their inputs are learned
    for turn, (xs, ys, us) in enumerate(zip(*(t.split(chunk, 1) for t in (x, y, counts)), strict=True)):
        if ranks is not None and turn % ranks.size != ranks.rank:
            if kind == "sampled":  # keep the generators as they would be in a single process
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
    learned: bool  # whether the layer's input depends on weights


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
    """One forward pass of examples [R, n, ...]: records every call of a layer with weights, and the likelihood's
    targets.
    """
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
    """Record the input and output of every layer with weights, each time it is called."""
    calls: list[Call] = []

    def note(layer: BayesianLayer, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return a copy to the network, because an in-place activation would change the recorded output."""
        calls.append(Call(layer, args[0].detach().clone(), output, args[0].requires_grad))
        return output.clone()

    layers = [layer for layer in network.bayesian_layers() if layer.names]
    return calls, [layer.register_forward_hook(note) for layer in layers]


@torch.no_grad()
def _add_squares(parts: dict[str, Tensor], calls: list[Call], deltas: Sequence[Tensor | None], examples: int) -> None:
    """Add sum_b g_b^2 for each weight; if a weight is used several times, its gradients are summed before squaring."""
    for name, found in _uses(parts, calls, deltas, examples).items():
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


def _uses(
    parts: Mapping[str, Tensor], calls: list[Call], deltas: Sequence[Tensor | None], examples: int
) -> dict[str, list[tuple[BayesianLayer, str, Tensor, Tensor]]]:
    """The layers that use each weight in `parts`, with their parameter's name, inputs and output gradients, [R, B, ...]
    each.
    """
    uses: dict[str, list[tuple[BayesianLayer, str, Tensor, Tensor]]] = {}
    for (layer, x, _, _), delta in zip(calls, deltas, strict=True):
        if delta is None:
            continue
        x, delta = layer.unfold(x), layer.unfold(delta)
        if x.shape[1] != examples * layer.fold:
            raise EvclError(
                f"{type(layer).__name__} {list(layer.names.values())} got {x.shape[1]} rows for {examples} examples: "
                "keep the batch as the first axis, followed by positions, so that the Fisher can separate the examples"
            )
        for parameter, name in layer.names.items():
            if name in parts:
                uses.setdefault(name, []).append((layer, parameter, x, delta))
    return uses


def _spread(parts: dict[str, Tensor], layers: dict[BayesianLayer, bool], share: Tensor | float) -> None:
    """Add to each weight a fraction `share` of its neighbours' Fisher. If several layers use a weight, this is done
    once, as for the first of them.
    """
    uses: dict[tuple[str, int, int], tuple[BayesianLayer, str, bool]] = {}
    for layer, learned in layers.items():
        for parameter, name in layer.names.items():
            part = layer.part(parts, parameter) if name in parts else None
            if part is None or part.dim() == 1:  # a single number has no neighbours
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
    """The gradients [R, b, *shape] of a slice of the examples, each summed over its rows."""
    rows = slice(piece.start * layer.fold, piece.stop * layer.fold)
    gradient = layer.example_gradient(parameter, x[:, rows], delta[:, rows])
    return gradient if layer.fold == 1 else gradient.unflatten(1, (-1, layer.fold)).sum(2)
