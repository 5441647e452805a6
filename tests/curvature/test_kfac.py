"""The Kronecker factors against a loop over replicas, examples and classes: slow, obvious, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import skip_init

import evcl
from evcl._core.errors import EvclError
from evcl.curvature import fisher, kfac
from evcl.nn import bayesianize

F64 = torch.float64


def made(trunk, generator, replicas=2):
    """A network with one head of three classes, and weights for it."""
    sources = [torch.Generator().manual_seed(seed) for seed in range(replicas)]
    network = bayesianize(trunk, generators=sources, replicas=replicas, dtype=F64)
    network.add_head()
    layout = network.layout = network.with_slots([evcl.nn.head(0, 3, 4)])
    return network, layout, torch.randn(replicas, layout.size, dtype=F64, generator=generator)


def gradients(layout, mean, x, c, forward):
    """d log p(c|x) / d weights, by name: of one example, by one replica."""
    weights = {name: view.detach().requires_grad_() for name, view in layout.views(mean).items()}
    log_p = forward(weights, x).log_softmax(0)
    grads = torch.autograd.grad(log_p[c], list(weights.values()))
    return float(log_p[c].exp().detach()), dict(zip(weights, grads, strict=True))


def mlp(weights, x):
    hidden = torch.relu(weights["1.weight"] @ x + weights["1.bias"])
    return weights["head 0.weight"] @ hidden + weights["head 0.bias"]


def test_of_one_example_the_product_is_the_fisher(generator):
    network, layout, mean = made(evcl.nn.mlp(5, [4]), generator)
    x, y = torch.randn(2, 1, 5, dtype=F64, generator=generator), torch.tensor([[1], [2]])
    found = kfac(network, mean, layout, x, y, [0])
    assert found.keys() == {"1.weight", "head 0.weight"}
    for r in range(2):
        for name, (a, g) in found.items():
            wanted = 0
            for c in range(3):
                p, grads = gradients(layout, mean[r], x[r, 0], c, mlp)
                both = torch.cat([grads[name], grads[name.replace("weight", "bias")].unsqueeze(1)], 1).flatten()
                wanted = wanted + p * torch.outer(both, both)
            torch.testing.assert_close(torch.kron(g[r], a[r]), wanted)


@pytest.mark.parametrize("chunk", [1000, 3])
def test_of_many_examples_each_factor_is_a_mean(generator, chunk):
    network, layout, mean = made(evcl.nn.mlp(5, [4]), generator)
    x = torch.randn(2, 7, 5, dtype=F64, generator=generator)
    y, u = torch.zeros(2, 7, dtype=torch.long), torch.rand(2, 7, dtype=F64, generator=generator)
    for weights in (None, u):
        found = kfac(network, mean, layout, x, y, [0], chunk=chunk, weights=weights)
        for r in range(2):
            a, g = 0, 0
            for b in range(7):
                ones = torch.cat([x[r, b], torch.ones(1, dtype=F64)])
                a = a + torch.outer(ones, ones) / 7
                for c in range(3):
                    p, grads = gradients(layout, mean[r], x[r, b], c, mlp)
                    delta = grads["1.bias"]  # what comes out of the layer has the gradient of its bias
                    count = 1.0 if weights is None else float(weights[r, b])
                    g = g + count * p * torch.outer(delta, delta) / 7
            torch.testing.assert_close(found["1.weight"][0][r], a)
            torch.testing.assert_close(found["1.weight"][1][r], g)


@pytest.mark.parametrize("kind", ["exact", "sampled", "empirical"])
def test_the_diagonal_of_one_example_is_the_diagonal_fisher(generator, kind):
    """So the two agree on labels, temperature and layers without a bias."""
    network, layout, mean = made(nn.Sequential(skip_init(nn.Linear, 5, 4, bias=False), nn.Tanh()), generator)
    x, y = torch.randn(2, 1, 5, dtype=F64, generator=generator), torch.tensor([[1], [2]])
    found = []
    for measure in (fisher, kfac):
        sources = [torch.Generator().manual_seed(r) for r in range(2)]
        found.append(measure(network, mean, layout, x, y, [0], kind, sources, temperature=2.0))
    diagonal, factors = found
    a, g = factors["0.weight"]
    wanted = layout.view(diagonal, "0.weight")
    a, g = (factor.diagonal(dim1=1, dim2=2) for factor in (a, g))
    torch.testing.assert_close(g.unsqueeze(2) * a.unsqueeze(1), wanted)


def test_other_layers_are_refused(generator):
    trunk = nn.Sequential(nn.Unflatten(1, (1, 5)), skip_init(nn.Conv1d, 1, 2, 4), nn.Flatten())
    network, layout, mean = made(trunk, generator)
    with pytest.raises(EvclError, match=r"'1' \(Conv\): Kronecker factors support only linear layers"):
        kfac(network, mean, layout, torch.randn(2, 2, 5, dtype=F64, generator=generator), torch.zeros(2, 2).long(), [0])
