"""One unit: with strength 1, the importance that EWC stores is the curvature of all rows' NLL, whatever the targets.

An independent, slow program computes it: for each row, autograd of log p(y | x) at every y, weighted by p(y).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from checks import quietly
from torch import nn
from torch.distributions import Bernoulli, Categorical, Normal, Poisson

import evcl
from evcl.targets import Energy

N, INPUTS, V, WARM = 12, 3, 4, 4.0
SOURCE = torch.Generator().manual_seed(5)
X = torch.randn(N, INPUTS, generator=SOURCE, dtype=torch.float64)
TOKENS = torch.randint(V, (N, 3), generator=SOURCE)


class Reader(nn.Module):
    """Logits of the next of V tokens, from the token before."""

    def __init__(self):
        super().__init__()
        self.one, self.two = quietly(lambda: nn.Linear(V, 5)), quietly(lambda: nn.Linear(5, V))

    def forward(self, x):
        return self.two(torch.tanh(self.one(nn.functional.one_hot(x[:, :-1].long(), V).to(self.one.weight)))).flatten(1)


def energy(outputs, y):
    return 0.5 * (outputs - y).square().sum(1) + outputs[:, 0].exp()


def classes(z, y, noise):
    return [(p, log_p) for p, log_p in zip(z.detach().softmax(0), z.log_softmax(0), strict=True)]


def warm_classes(z, y, noise):
    return [(p, WARM * log_p) for p, log_p in classes(z / WARM, y, noise)]


def numbers(z, y, noise):
    """At mean +- std, which have the moments of a Gaussian that the square of a gradient needs."""
    of, std = Normal(z[0], (noise[0] / 2).exp()), (noise[0] / 2).exp()
    return [(0.5, of.log_prob(z[0].detach() + sign * std)) for sign in (-1, 1)]


def counts(z, y, noise):
    of = Poisson((z[0] + noise[0]).exp())
    return [(of.log_prob(k).exp().detach(), of.log_prob(k)) for k in torch.arange(200.0).double()]


def labels(z, y, noise):
    of = Bernoulli(logits=z)
    each = [of.log_prob(torch.tensor(one).double()).sum() for one in itertools.product((0, 1), repeat=len(z))]
    return [(one.exp().detach(), one) for one in each]


def true_energy(z, y, noise):
    return [(1.0, energy(z.unsqueeze(0), y.unsqueeze(0)).sum())]


def true_tokens(z, y, noise):
    return [(1.0, Categorical(logits=z.view(2, V)).log_prob(y[1:]).sum())]


CASES = {
    "categorical": (X, (X[:, 0] > 0).long(), classes, {"fisher_temperature": 1.0}),
    "categorical, T": (X, (X[:, 0] > 0).long(), warm_classes, {"fisher_temperature": WARM}),
    "gaussian": (X, X.sum(1) + 0.3 * X[:, 0] ** 2, numbers, {}),
    "poisson": (X, (3 * X[:, 0].abs()).round(), counts, {}),
    "bernoulli": (X, (X[:, :2] > 0).double(), labels, {}),
    "energy": (X, torch.stack([X[:, 0], X[:, 1]], 1), true_energy, {"likelihood": Energy(energy)}),
    "next-token": (TOKENS, None, true_tokens, {}),
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("method", ["ewc", "evcl"])
def test_importance_is_the_curvature_of_all_rows(kind, method):
    x, y, expand, given = CASES[kind]
    network = Reader() if kind == "next-token" else evcl.nn.mlp(INPUTS, [6])
    if kind == "energy":
        network = nn.Sequential(network, quietly(lambda: nn.Linear(6, 2)))
    given = {"likelihood": kind.split(",")[0], **({"posterior": "diagonal"} if method == "evcl" else {}), **given}
    learner = evcl.Learner(network.double(), method, strength=1.0, fisher_spread=0.0, **given)
    learner.learn(x, y, epochs=3)
    run = learner.state.run
    layout, q = run.network.layout, run.network.posterior
    weights = {name: view[0].detach().clone().requires_grad_() for name, view in layout.views(q.mean).items()}
    trunk = {name: w for name, w in weights.items() if "head" not in name}
    head = [w for name, w in weights.items() if "head" in name]
    noise = run.network.number_head(0).beside[0] if kind in ("gaussian", "poisson") else None
    wanted = {name: torch.zeros_like(w) for name, w in weights.items()}
    for i, row in enumerate(x):
        out = torch.func.functional_call(network, trunk, row.unsqueeze(0))
        z = (nn.functional.linear(out, *head) if head else out)[0]
        target = row if y is None else y[i]
        for p, log_p in expand(z, target, noise):
            grads = torch.autograd.grad(log_p, list(weights.values()), retain_graph=True)
            for name, grad in zip(weights, grads, strict=True):
                wanted[name] += p * grad.square()
    for name, found in layout.views(run.memory.importance).items():
        torch.testing.assert_close(found[0], wanted[name], rtol=1e-7, atol=1e-9)
