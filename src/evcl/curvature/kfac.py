"""Kronecker factors of the Fisher, layer by layer (Martens and Grosse, 2015), for linear layers.

With a = [x; 1] the input of a layer and g = d log p(c|x) / d (its output), the Fisher of its [W, b] is

    E[g g^T (x) a a^T]  ~  G (x) A,     A = 1/n sum_b a_b a_b^T,     G = 1/n sum_b sum_c w_bc g_bc g_bc^T

where (x) is the Kronecker product, b counts the n examples and c the classes, and w is as in fisher.py: for `exact`,
p(c|x_b). The approximation is exact for a single example. For a change D of [W, b], the quadratic form of G (x) A is
tr(D^T G D A).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl._core.errors import EvclError
from evcl.curvature.fisher import Call, output_gradients, recorded
from evcl.likelihoods import CATEGORICAL, Likelihood
from evcl.nn import BayesianNetwork, Layout, Linear

Factors = dict[str, tuple[Tensor, Tensor]]  # weight name -> (A [R, i, i] or, with a bias, [R, i + 1, i + 1]; G)


def kfac(
    network: BayesianNetwork,
    mean: Tensor,
    layout: Layout,
    x: Tensor,
    y: Tensor,
    heads: Sequence[int],
    kind: str = "exact",
    generators: Sequence[torch.Generator] | None = None,
    chunk: int = 1000,
    temperature: Tensor | float = 1.0,
    weights: Tensor | None = None,
    likelihood: Likelihood = CATEGORICAL,
    task: int | None = None,
) -> Factors:
    """A and G of each layer that these heads use, at the weights `mean` [R, P]; the arguments are those of `fisher`.

    An example with weight u in the loss has weight u in G.
    """
    network.bind(mean, None, layout)
    network.weights.noise = None
    found: Factors = {}
    counts = torch.ones_like(y, dtype=x.dtype) if weights is None else weights
    for xs, ys, us in zip(*(t.split(chunk, 1) for t in (x, y, counts)), strict=True):
        with network.using(task):
            calls, targets = recorded(network, xs, ys, us, heads, kind, generators, temperature, likelihood)
        for i, deltas in enumerate(output_gradients(calls, targets)):
            for call, delta in zip(calls, deltas, strict=True):
                if delta is not None:
                    _add(found, call, delta, x.shape[1], first=i == 0)
    return found


@torch.no_grad()
def _add(found: Factors, call: Call, delta: Tensor, examples: int, first: bool) -> None:
    """Add the result of one pass to a layer's factors; A is the same in all passes of a chunk, so it is added once."""
    layer = call.layer
    if not isinstance(layer, Linear) or call.x.dim() != 2 or layer.rows:
        raise EvclError(
            f"{layer.path!r} ({type(layer).__name__}): Kronecker factors support only linear layers on [batch, inputs]"
        )
    a, g = layer.unfold(call.x), layer.unfold(delta)
    if "bias" in layer.names:
        a = F.pad(a, (0, 1), value=1.0)
    name = layer.names["weight"]
    if name not in found:
        found[name] = a.new_zeros(len(a), a.shape[2], a.shape[2]), g.new_zeros(len(g), g.shape[2], g.shape[2])
    if first:
        found[name][0].baddbmm_(a.mT, a, alpha=1 / examples)
    found[name][1].baddbmm_(g.mT, g, alpha=1 / examples)
