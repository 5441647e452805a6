"""Policies: their Fisher beside naive forms in float64, and what they say of actions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from evcl.curvature import Sample, fisher
from evcl.nn import bayesianize, mlp
from evcl.rl.policies import DISCRETE, NORMAL, VALUES

R, N, INPUTS = 2, 6, 3


@pytest.fixture
def measured():
    """The Fisher of a policy at x [R, N, INPUTS] by the library, and the network's parameters and outputs."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(R, N, INPUTS, generator=g, dtype=torch.float64)
    sources = [torch.Generator().manual_seed(i) for i in range(R)]
    outputs = 4
    last = torch.nn.utils.skip_init(torch.nn.Linear, 5, outputs)  # `sources` draw its weights
    module = torch.nn.Sequential(*mlp(INPUTS, [5]), last).double()
    network = bayesianize(module, init_std=None, generators=sources, dtype=torch.float64)
    network.whole = outputs
    network.posterior.mean.mul_(0.5)  # sigma within its limits
    mean, layout = network.posterior.mean, network.layout

    def at(policy):
        return fisher(Sample(network, mean, layout, [0], x), "exact", None, 1.0, 0.0, policy)

    def plain(r, n, weights):
        views = layout.views(weights.unsqueeze(0))
        state = {name: view[0] for name, view in views.items()}
        return torch.func.functional_call(module, state, (x[r, n].unsqueeze(0),))[0]

    return at, plain, mean


def mean_square(measured, per_state):
    """[R, P]: the mean over states of what `per_state(jacobian [o, P], outputs [o])` gives."""
    _, plain, mean = measured
    found = torch.zeros_like(mean)
    for r in range(R):
        for n in range(N):
            jacobian = torch.func.jacrev(lambda w, r=r, n=n: plain(r, n, w))(mean[r])
            found[r] += per_state(jacobian, plain(r, n, mean[r]).detach()) / N
    return found


def test_the_fisher_of_a_discrete_policy_is_exact_over_actions(measured):
    """sum_a pi(a) (d log pi(a))^2, with d log pi(a) = d z_a - sum_b pi(b) d z_b."""

    def naive(jacobian, z):
        p = z.softmax(0)
        return sum(p[a] * (jacobian[a] - p @ jacobian).square() for a in range(len(p)))

    torch.testing.assert_close(measured[0](DISCRETE), mean_square(measured, naive), rtol=1e-9, atol=1e-12)


def test_the_fisher_of_a_normal_policy_is_the_mean_over_actions(measured):
    """E_a (d log pi(a))^2 by Gauss-Hermite quadrature over each number of the action, which is exact here."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(6)
    weights = weights / weights.sum()

    def naive(jacobian, z):
        found = 0.0
        std = z[2:].exp()
        for i, wi in zip(nodes, weights, strict=True):
            for j, wj in zip(nodes, weights, strict=True):
                noise = torch.tensor([i, j], dtype=torch.float64)
                score = torch.cat([noise / std, noise.square() - 1])  # d log pi / d (mu, log sigma)
                found = found + wi * wj * (score @ jacobian).square()
        return found

    torch.testing.assert_close(measured[0](NORMAL), mean_square(measured, naive), rtol=1e-8, atol=1e-12)


def test_the_fisher_of_values_is_their_squared_gradient(measured):
    found = measured[0](VALUES)
    torch.testing.assert_close(found, mean_square(measured, lambda jacobian, z: jacobian.square().sum(0)))


def test_actions_are_drawn_as_the_policy_says():
    g = torch.Generator().manual_seed(0)
    z = torch.tensor([[0.0, 1.0, -1.0]]).expand(20_000, 3)
    drawn = DISCRETE.act(z, DISCRETE.noise((20_000,), 3, g))
    share = torch.bincount(drawn, minlength=3) / 20_000
    torch.testing.assert_close(share, z[0].softmax(0), atol=0.02, rtol=0)
    at = torch.tensor([[0.5, -0.2]]).expand(20_000, 2)
    numbers = NORMAL.act(at, NORMAL.noise((20_000,), 1, g))
    assert numbers.mean() == pytest.approx(0.5, abs=0.03)
    assert numbers.std() == pytest.approx(math.exp(-0.2), abs=0.03)


def test_policies_agree_with_torchs_distributions():
    g = torch.Generator().manual_seed(1)
    z, old = (0.5 * torch.randn(5, 4, generator=g, dtype=torch.float64) for _ in range(2))
    actions = torch.tensor([0, 3, 1, 2, 2])
    theirs, before = (torch.distributions.Categorical(logits=t) for t in (z, old))
    torch.testing.assert_close(DISCRETE.log_prob(z, actions), theirs.log_prob(actions))
    torch.testing.assert_close(DISCRETE.entropy(z), theirs.entropy())
    torch.testing.assert_close(DISCRETE.divergence(old, z), torch.distributions.kl_divergence(before, theirs))
    normal, normal_before = (torch.distributions.Normal(t[:, :2], t[:, 2:].exp()) for t in (z, old))
    numbers = torch.randn(5, 2, generator=g, dtype=torch.float64)
    torch.testing.assert_close(NORMAL.log_prob(z, numbers), normal.log_prob(numbers).sum(1))
    torch.testing.assert_close(NORMAL.entropy(z), normal.entropy().sum(1))
    kl = torch.distributions.kl_divergence(normal_before, normal).sum(1)
    torch.testing.assert_close(NORMAL.divergence(old, z), kl)
