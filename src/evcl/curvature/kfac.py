"""Kronecker factors of the Fisher, layer by layer (Martens and Grosse, 2015).

With a = [x; 1] the input of a layer and g = d log p(c|x) / d (its output), the Fisher of its [W, b] is

    E[g g^T (x) a a^T]  ~  G (x) A,     A = 1/n sum_b a_b a_b^T,     G = 1/n sum_b sum_c w_bc g_bc g_bc^T

where (x) is the Kronecker product, b counts the n examples and c the classes, and w is as in fisher.py: for `exact`,
p(c|x_b). It is exact for a single example, and if g g^T is the same for all
examples, as in linear regression. For a change D of [W, b], the quadratic form of G (x) A is tr(D^T G D A).

If an example has positions (a sequence, the patches of a convolution), or if a weight is used several times, each use
is a row of its own: A is the mean over all rows, and G sums over the rows of an example (KFAC-expand, Eschenhagen et
al., 2023). The rows of an embedding are its outputs, and A is diagonal. Each projection of an attention is a layer of
its own. All other weights have no factors, and their diagonal Fisher is used: norms, grouped convolutions, parameters
outside layers, a table that a linear layer shares, biases of layers that share only their weight.

`spread` is a damping of the factors: a fraction of the mean of G's diagonal is added to it and, if the layer's inputs
are learned, a fraction of the mean of A's diagonal to A's. To first order, this adds to the diagonal of G (x) A what
`fisher` adds with the same `spread`. It protects weights of inactive units, whose rows in A and G are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from evcl.curvature.fisher import Call, Sample, add, add_neighbours, likelihood_targets, note_layers, output_gradients
from evcl.nn import BayesianLayer, BayesianNetwork, Layout
from evcl.posterior.kronecker import Block, Factors
from evcl.targets import CATEGORICAL, Likelihood


class Kronecker(NamedTuple):
    """The Fisher of a network: factors of its blocks, A [R, i, i] or [R, i], and G [R, o, o], and the diagonal [R, P]
    of all weights without factors, which is 0 for weights that have them.
    """

    factors: Factors
    diagonal: Tensor


def blocks(network: BayesianNetwork, layout: Layout) -> dict[str, Block]:
    """The blocks of a network that are in this layout, by their keys."""
    by_key: dict[str, Block] = {}
    without: set[str] = set()  # weights without factors
    for layer in network.bayesian_layers():
        own = _own_blocks(layer, layout)
        without |= set() if own else set(layer.names.values())
        for key, block in own:
            before = by_key.get(key, block)
            if before.table != block.table:
                without.add(block.weight)
            same = before == block
            by_key[key] = block if same else block._replace(bias=None)  # one weight, several biases
    return {key: block for key, block in by_key.items() if block.weight not in without}


def _own_blocks(layer: BayesianLayer, layout: Layout) -> list[tuple[str, Block]]:
    """The key and block of each piece of a layer; none if it has no factors."""
    weight, bias = layer.names.get("weight"), layer.names.get("bias")
    if layer.output_axis is None or weight is None or weight not in layout.shapes:
        return []
    table, every = layer.output_axis == 1, slice(None)
    if layer.pieces == 1 and "weight" not in layer.rows:
        return [(weight, Block(weight, every, bias, layer.rows.get("bias", every), table))]
    rows = layer.rows.get("weight", slice(0, layout.shapes[weight][0]))
    shift = layer.rows.get("bias", slice(0)).start or 0
    pieces, length = [], (rows.stop - rows.start) // layer.pieces
    for start in range(0, rows.stop - rows.start, length):
        own, biases = (slice(first + start, first + start + length) for first in (rows.start, shift))
        pieces.append((f"{weight} {own.start}:{own.stop}", Block(weight, own, bias, biases, table)))
    return pieces


class _Sums:
    """Sums of one block: a a^T and g g^T over all rows, and their number; `learned` is above 0 if its inputs are."""

    def __init__(self, block: Block, layout: Layout, like: Tensor) -> None:
        i, o = block.sizes(layout)
        self.a = like.new_zeros(len(like), i) if block.table else like.new_zeros(len(like), i, i)
        self.g = like.new_zeros(len(like), o, o)
        self.rows, self.learned = like.new_zeros(len(like)), like.new_zeros(1)


class FactorSums:
    """Sums over examples, from which the factors of all blocks and the diagonal of all other weights are made."""

    def __init__(self, network: BayesianNetwork, layout: Layout, like: Tensor) -> None:
        self.layout, self.blocks = layout, blocks(network, layout)
        covered = {name for block in self.blocks.values() for name in (block.weight, block.bias)}
        self.total = torch.zeros_like(like)
        self.parts = {name: view for name, view in layout.views(self.total).items() if name not in covered}
        self.each = {key: _Sums(block, layout, like) for key, block in self.blocks.items()}

    def add(self, calls: list[Call], deltas: Sequence[Tensor | None], examples: int, first: bool) -> None:
        """Add one target's output gradients; `first`: the inputs of these calls have not been added yet."""
        for call, delta in zip(calls, deltas, strict=True):
            if delta is not None:
                _add(self.each, self.blocks, call, delta, self.layout, first)
        add(torch.square, self.parts, calls, deltas, examples)

    def tensors(self) -> list[Tensor]:
        return [self.total, *(t for one in self.each.values() for t in (one.a, one.g, one.rows, one.learned))]

    def mean(self, examples: int) -> Kronecker:
        """The factors of all blocks, 0 for a block that was not used."""
        factors: Factors = {}
        for key, one in self.each.items():
            factors[key] = one.a / one.rows.clamp_min(1).view(-1, *[1] * (one.a.dim() - 1)), one.g / examples
        return Kronecker(factors, self.total / examples)


def kfac(
    sample: Sample,
    kind: str = "exact",
    generators: Sequence[torch.Generator] | None = None,
    temperature: Tensor | float = 1.0,
    spread: Tensor | float = 0.0,
    likelihood: Likelihood = CATEGORICAL,
) -> Kronecker:
    """The factors of each block that these heads use; the arguments are those of `fisher`. An example with weight u in
    the loss has weight u in G.
    """
    sums = FactorSums(sample.network, sample.layout, sample.mean)
    seen: dict[BayesianLayer, bool] = {}
    wanted = likelihood_targets(sample, kind, generators, temperature, likelihood)
    for calls, targets, examples in sample.passes(wanted):
        note_layers(seen, calls)
        for i, deltas in enumerate(output_gradients(calls, targets)):
            sums.add(calls, deltas, examples, first=i == 0)
    if isinstance(spread, Tensor) or spread > 0:
        add_neighbours(sums.parts, seen, spread)
    if sample.ranks is not None:
        whole = sample.ranks.sum_(torch.cat([tensor.flatten() for tensor in sums.tensors()]))
        for tensor, part in zip(sums.tensors(), whole.split([t.numel() for t in sums.tensors()]), strict=True):
            tensor.copy_(part.view(tensor.shape))
    factors, diagonal = sums.mean(sample.x.shape[1])
    used = {key: pair for key, pair in factors.items() if bool(sums.each[key].rows.any())}
    for key, (a, g) in used.items():
        _damp(a, g, spread, bool(sums.each[key].learned), sums.blocks[key])
    return Kronecker(used, diagonal)


@torch.no_grad()
def _add(
    sums: dict[str, _Sums], known: dict[str, Block], call: Call, delta: Tensor, layout: Layout, first: bool
) -> None:
    """Add one call of a layer. Its inputs are the same in all passes of a chunk, so they are added once."""
    own = [(key, known[key], sums[key]) for key, _ in _own_blocks(call.layer, layout) if key in known]
    if not own:
        return
    x, delta = call.layer.unfold(call.x), call.layer.unfold(delta)
    outputs = call.layer.output_rows(x, delta)
    for (_, _, one), g in zip(own, outputs.chunk(len(own), 2), strict=True):
        one.g.baddbmm_(g.mT, g)
    if first:
        a, rows = call.layer.input_factor(x, own[0][1].bias is not None)
        for _, _, one in own:
            one.a += a
            one.rows += rows
            one.learned += call.learned


def _damp(a: Tensor, g: Tensor, spread: Tensor | float, learned: bool, block: Block) -> None:
    share = spread.view(-1, 1) if isinstance(spread, Tensor) else spread
    if g.shape[1] > 1:  # with one output, no other weight has the same input
        own = g.diagonal(dim1=1, dim2=2)
        own += share * own.mean(1, keepdim=True)
    if learned and not block.table:  # the input of a bias is always 1
        own = a.diagonal(dim1=1, dim2=2)[:, : a.shape[1] - (block.bias is not None)]
        own += share * own.mean(1, keepdim=True)
