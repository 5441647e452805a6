"""The Fisher against a loop over examples and classes with torch.func: slow, obvious, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import evcl
from evcl.curvature import fisher
from evcl.nn import bayesianize, head_names

F64 = torch.float64


class TwiceAndAlong(nn.Module):
    """A layer used twice, tied weights, and a linear layer along a sequence."""

    def __init__(self):
        super().__init__()
        self.token, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.token.weight

    def forward(self, x):
        h = self.token(x).tanh()
        return self.tied(self.token(h).tanh()).tanh().mean(1)


def networks():
    return {
        "mlp": (evcl.nn.mlp(6, [5, 4]), (6,)),
        "convolutional": (
            nn.Sequential(
                nn.Conv2d(2, 4, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(4, 4, (3, 2), stride=2, groups=2),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(24, 5),
                nn.Tanh(),
            ),
            (2, 7, 4),
        ),
        "activations in place": (
            nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 4), nn.ReLU(inplace=True)),
            (6,),
        ),
        "tied, twice, along a sequence": (TwiceAndAlong(), (3, 4)),
    }


def prepared(name, replicas):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, shape = networks()[name]
    source = torch.Generator().manual_seed(1)
    network = bayesianize(module, init_std=None, replicas=replicas, dtype=F64)
    width = network.trunk(torch.zeros(replicas, *shape, dtype=F64)).shape[1]
    k = network.add_head()
    layout = network.with_head(k, 3, width)
    mean = 0.7 * torch.randn(replicas, layout.size, generator=source, dtype=F64)
    x = torch.randn(replicas, 11, *shape, generator=source, dtype=F64)
    y = torch.randint(3, (replicas, 11), generator=source)
    return module.double(), network, layout, mean, x, y


def reference(module, layout, mean, x, y, kind):
    """sum_c w_c (d log p(c|x) / d theta)^2, example by example, replica by replica."""
    names = head_names(0)
    total = torch.zeros_like(mean)
    for r in range(len(mean)):
        weights = {name: view[0] for name, view in layout.views(mean[r : r + 1]).items()}

        def log_p(weights, example):
            trunk = {name: w for name, w in weights.items() if name not in names.values()}
            h = torch.func.functional_call(module, trunk, (example.unsqueeze(0),), tie_weights=True)
            return (h @ weights[names["weight"]].mT + weights[names["bias"]])[0].log_softmax(0)

        for n in range(x.shape[1]):
            jacobian = torch.func.jacrev(log_p)(weights, x[r, n])
            p = log_p(weights, x[r, n]).exp()
            if kind == "empirical":
                p = nn.functional.one_hot(y[r, n], 3).to(p)
            for name, span in layout.spans.items():
                squares = jacobian[name].flatten(1).square()
                total[r, span] += p @ squares / x.shape[1]
    return total


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("kind", ["exact", "empirical"])
@pytest.mark.parametrize("name", networks())
def test_it_is_the_loop_over_examples(name, kind, replicas):
    module, network, layout, mean, x, y = prepared(name, replicas)
    expected = reference(module, layout, mean, x, y, kind)
    for chunk in (1000, 4):
        found = fisher(network, mean, layout, x, y, [0], kind, chunk=chunk)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-18)


def test_pieces_of_examples_add_up(monkeypatch):
    _, network, layout, mean, x, y = prepared("convolutional", 3)
    whole = fisher(network, mean, layout, x, y, [0])
    monkeypatch.setattr("evcl.nn.layers.EXAMPLE_GRADIENT_NUMBERS", 1)
    torch.testing.assert_close(fisher(network, mean, layout, x, y, [0]), whole, rtol=1e-12, atol=0)


def test_sampled_labels_agree_on_average():
    """Labels drawn from the model give the exact Fisher in expectation; the true labels do not."""
    _, network, layout, mean, x, y = prepared("mlp", 1)
    exact = fisher(network, mean, layout, x, y, [0])
    many = x.repeat(1, 400, 1), y.repeat(1, 400)
    sources = [torch.Generator().manual_seed(3)]
    sampled = fisher(network, mean, layout, *many, [0], "sampled", sources)
    big = exact > exact.mean()
    torch.testing.assert_close(sampled[big], exact[big], rtol=0.15, atol=0)
    empirical = fisher(network, mean, layout, x, y, [0], "empirical")
    assert ((empirical - exact).abs()[big] / exact[big]).max() > 0.3


def test_it_is_not_the_square_of_the_batch_mean():
    """The common mistake is smaller by about the batch's size."""
    _, network, layout, mean, x, y = prepared("mlp", 1)
    found = fisher(network, mean, layout, x, y, [0], "empirical")
    leaves = network.bind(mean, None, layout)
    loss = nn.functional.cross_entropy(network.logits(x[0], [0]), y[0])
    mistaken = torch.cat([g.flatten() for g in torch.autograd.grad(loss, leaves)]).square()
    assert mistaken.sum() < 0.5 * found.sum()


def test_a_network_that_hides_examples_is_refused():
    class Flattens(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.utils.skip_init(nn.Linear, 2, 2)

        def forward(self, x):
            return self.layer(x.reshape(-1, 2)).reshape(len(x), -1)

    learner = evcl.EWC(Flattens(), epochs=1, init="draw")
    with pytest.raises(evcl.EvclError, match="saw 6 rows for 3 examples"):
        learner.learn((torch.ones(3, 4), [0, 1, 1]))


def test_an_unknown_kind_is_refused():
    _, network, layout, mean, x, y = prepared("mlp", 1)
    with pytest.raises(evcl.EvclError, match="exact, sampled, empirical"):
        fisher(network, mean, layout, x, y, [0], "true")
