"""How many examples pass through a network at once follows from the size of their activations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evcl.curvature import Sample, fisher, kfac
from evcl.nn import bayesianize, head, outputs
from evcl.nn.sizes import Size, measured

SOURCE = torch.Generator().manual_seed(0)


def made(replicas=1):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Tanh())
    network = bayesianize(module, init_std=None, replicas=replicas, dtype=torch.float64)
    k = network.add_head()
    layout = network.with_slots([head(k, 3, 96)])
    mean = 0.3 * torch.randn(replicas, layout.size, generator=SOURCE, dtype=torch.float64)
    x = torch.randn(replicas, 20, 2, 8, 8, generator=SOURCE, dtype=torch.float64)
    y = torch.randint(3, (replicas, 20), generator=SOURCE)
    return network, layout, mean, x, y


def test_only_what_grows_with_the_examples_counts():
    weight = torch.randn(50, 4, generator=SOURCE)

    def run(x):  # [n, 4] -> [n, 50], [n, 50], and 200 numbers that do not depend on n; views cost nothing
        return ((x @ (2 * weight).T).tanh()).view(-1)

    assert measured(run, torch.zeros(1, 4)) == Size(50, 100)


def rows_of(network, run):
    """The largest number of examples in a pass through the network, and what `run` returns."""
    seen = []
    handle = network.trunk[0].register_forward_hook(lambda layer, args, out: seen.append(len(args[0])))
    found = run()
    handle.remove()
    return max(seen), found


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("kind", ["exact", "empirical"])
def test_the_fisher_in_small_passes_is_the_same(monkeypatch, kind, replicas):
    network, layout, mean, x, y = made(replicas)
    sample = Sample(network, mean, layout, [0], x, y)
    most, wanted = rows_of(network, lambda: fisher(sample, kind))
    factors = kfac(sample, kind).factors
    assert most == 20 * replicas
    size = network.size(x, lambda _: None, "fisher False")
    monkeypatch.setattr("evcl.nn.sizes.KEPT_NUMBERS", 7 * size.total)
    most, found = rows_of(network, lambda: fisher(sample, kind))
    assert most == 7 // replicas * replicas
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(kfac(sample, kind).factors, factors)


def test_the_fisher_holds_no_more_than_its_bound(monkeypatch):
    """What autograd keeps of a pass is counted."""
    network, layout, mean, x, y = made()
    fisher(Sample(network, mean, layout, [0], x, y))
    total = network.size(x, lambda _: None, "fisher False").total
    numbers = {}
    for rows in (2, 10):
        monkeypatch.setattr("evcl.nn.sizes.KEPT_NUMBERS", rows * total)
        held: list[int] = []

        def pack(tensor, held=held):
            held.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            fisher(Sample(network, mean, layout, [0], x[:, :rows], y[:, :rows]), "empirical")
        numbers[rows] = sum(held)
        assert numbers[rows] <= rows * total + 3 * layout.size
    assert numbers[10] > 2 * numbers[2]


@pytest.mark.parametrize("replicas", [1, 3])
def test_predictions_in_small_passes_are_the_same(monkeypatch, replicas):
    network, layout, mean, x, _ = made(replicas)
    most, wanted = rows_of(network, lambda: outputs(network, mean, layout, x, [0]))
    assert most == 20 * replicas
    monkeypatch.setattr("evcl.nn.sizes.PASS_NUMBERS", 6 * 64 * 4)  # four times the output of the convolution
    most, found = rows_of(network, lambda: outputs(network, mean, layout, x, [0]))
    assert most <= 4
    torch.testing.assert_close(found, wanted)


def test_a_network_that_needs_more_examples_has_no_size():
    class Pairs(nn.Module):
        def forward(self, x):
            if len(x) < 3:
                raise RuntimeError("too few")
            return x.flatten(1)

    with torch.random.fork_rng(devices=[]):
        network = bayesianize(nn.Sequential(nn.Conv1d(1, 2, 1), Pairs()), init_std=None)
    x = torch.zeros(1, 9, 1, 4)
    assert outputs(network, network.posterior.mean, network.layout, x, []).shape == (1, 9, 8)
