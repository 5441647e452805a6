"""The outputs of a network on many rows, in pieces that fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from evcl.nn.network import ALL_LAYERS, BayesianNetwork
from evcl.nn.sizes import MOST_ROWS
from evcl.nn.slots import head_names
from evcl.posterior import Layout

MIN_HEADS_TOGETHER = 64  # heads whose outputs are one matrix product: with fewer, one after another takes no time


@contextmanager
def bound_to(network: BayesianNetwork, weights: Tensor, task: int, rows: int) -> Iterator[None]:
    """Inside this context, parts of the trunk can be called on batches of this many rows, with these weights [R, P]."""
    network.bind(weights, None, network.layout)
    network.weights.noise, network.weights.batch = None, rows
    network.weights.passes += 1
    with network.using(task):
        yield


@torch.no_grad()
def outputs(
    network: BayesianNetwork,
    weights: Tensor,
    layout: Layout,
    x: Tensor,
    heads: Sequence[int],
    chunk: int | None = None,
    change: Callable[[Tensor], Tensor] = lambda y: y,
    task: int | None = None,
    from_below: bool = False,
) -> Tensor:
    """[R, N, ...]: the network's outputs with these weights [R, P] on x [U, N, ...]; replica r uses row r mod U.

    The outputs of the heads are concatenated; without heads, the trunk's features are returned. `change` is applied to
    each chunk of outputs [R*n, outputs]. A chunk holds `chunk` examples, counted over all replicas.
    `task`: whose FiLM row to use; None: that of the last task used. `from_below`: x is what `network.below` has found.
    """
    r = len(weights)
    if not from_below and (features := network.below(x)) is not None:
        x, from_below = features, True
    if chunk is None:
        # otherwise, an example may need far more memory than its inputs
        plain = x.dim() == 3 and (network.fixed == ALL_LAYERS if from_below else network.dense)
        chunk = 500_000 if plain and x.is_cuda else MOST_ROWS
        size = None if plain else network.size(x, partial(network, from_below=from_below), f"forward {from_below}")
        chunk = chunk if size is None else size.forward_rows(x.is_cuda, r)
    network.bind(weights, None, layout)
    network.weights.noise = None
    together = _together(network, weights, layout, heads)
    pieces = []
    for xs in x.split(max(1, chunk // r), 1):
        copies = xs.repeat(r // len(xs), *[1] * (x.dim() - 1))  # not a view, because a forward pass may write to it
        with network.using(task):
            ys = network.logits(copies.flatten(0, 1), [] if together else heads, from_below)
        if together:
            ys = torch.baddbmm(together[1], ys.unflatten(0, (r, -1)), together[0]).flatten(0, 1)
        pieces.append(change(ys).unflatten(0, (r, -1)))
    return torch.cat(pieces, 1)


def _together(
    network: BayesianNetwork, weights: Tensor, layout: Layout, heads: Sequence[int]
) -> tuple[Tensor, Tensor] | None:
    """The weights [R, features, K] and biases [R, 1, K] of all outputs of these heads, if the heads are many, have one
    shape and lie one after another in the layout, as those of a stream do; otherwise None.
    """
    if len(heads) < MIN_HEADS_TOGETHER or network.whole or network.beside_outputs:
        return None
    names, spans = [head_names(k) for k in heads], layout.spans
    first, start = layout.shapes[names[0]["weight"]], spans[names[0]["weight"]].start
    size = first[0] * (first[1] + 1)
    if any(layout.shapes[name["weight"]] != first for name in names):
        return None
    ends = [(spans[name["weight"]].start, spans[name["bias"]].stop) for name in names]
    if ends != [(start + i * size, start + (i + 1) * size) for i in range(len(names))]:
        return None
    each = weights[:, start : start + len(heads) * size].unflatten(1, (len(heads), size))
    weight, bias = each.split([first[0] * first[1], first[0]], 2)
    return weight.unflatten(2, first).flatten(1, 2).mT, bias.flatten(1).unsqueeze(1)
