"""The outputs of many heads are one matrix product: each head's are those that it has alone."""

from __future__ import annotations

import pytest
import torch

from evcl.nn import bayesianize, head, mlp, outputs
from evcl.nn.passes import MANY


@pytest.mark.parametrize("change", ["none", "another order", "another shape"])
def test_many_heads_are_each_alone(change, generator):
    network = bayesianize(mlp(3, [5]), replicas=2, dtype=torch.float64)
    sizes = [2] * (MANY + 1)
    if change == "another shape":
        sizes[7] = 3
    layout = network.layout
    for size in sizes:
        k = network.add_head()
        network.layout = layout = network.with_slots([head(k, size, 5)])
    weights = torch.randn(2, layout.size, generator=generator, dtype=torch.float64)
    heads = list(range(len(sizes)))
    if change == "another order":
        heads = heads[::-1]
    x = torch.randn(1, 4, 3, generator=generator, dtype=torch.float64)
    found = outputs(network, weights, layout, x, heads)
    alone = torch.cat([outputs(network, weights, layout, x, [k]) for k in heads], 2)
    torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-12)
