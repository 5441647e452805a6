"""GVCL: its KL by definition, VCL as one end of it, and online EWC as the other."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from small_runs import F64, assert_springs, learned

import evcl
from evcl.methods import TaskData
from evcl.methods.gvcl import ScaledKL
from evcl.methods.vcl import KL
from evcl.nn import Gaussian


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=F64)


def some(generator, r=3, p=40):
    """q, a prior that is narrower than the first prior, and the first prior's precision."""
    first = torch.rand(1, p, generator=generator, dtype=F64) + 0.5
    prior = Gaussian(draw(generator, r, p), -0.5 * (first + draw(generator, r, p).square()).log())
    return Gaussian(draw(generator, r, p), draw(generator, r, p) - 1), prior, first


def test_its_kl_is_that_of_the_definition(generator):
    """Weight by weight, with a prior that is narrower or wider than the first."""
    q, prior, first = some(generator, r=1)
    prior = Gaussian(prior.mean, prior.log_std + (torch.arange(40) % 2) * 2)
    total = 0.0
    for i in range(40):
        v, s, s0 = q.variance()[0, i].item(), prior.variance()[0, i].item(), 1 / first[0, i].item()
        stiff = 1 / s0 + 7 * max(1 / s - 1 / s0, 0)
        total += 0.5 * (v / s + (q.mean - prior.mean)[0, i].item() ** 2 * stiff + math.log(s / v) - 1)
    assert ScaledKL(prior, first, 7.0, 0.1).loss(q).item() == pytest.approx(0.1 * total, rel=1e-12)


@pytest.mark.parametrize("strength", [0.0, 30.0, torch.tensor([[0.5], [3.0], [100.0]], dtype=F64)])
def test_its_springs_are_its_gradients(strength, generator):
    q, prior, first = some(generator)
    weight = torch.tensor([[0.1], [1.0], [2.0]], dtype=F64)
    assert_springs([ScaledKL(prior, first, strength, weight)], q, rtol=1e-10)


def test_with_strength_1_it_is_the_kl_where_the_prior_is_no_wider_than_the_first(generator):
    q, prior, first = some(generator)
    torch.testing.assert_close(ScaledKL(prior, first, 1.0, 0.3).loss(q), KL(prior, 0.3).loss(q), rtol=1e-12, atol=0)
    wider = Gaussian(prior.mean, prior.log_std + 3)
    assert (ScaledKL(wider, first, 1.0, 0.3).loss(q) > KL(wider, 0.3).loss(q) + 1).all()
    same = Gaussian(prior.mean, (-0.5 * first.log()).expand_as(prior.mean))  # nothing was added: no strength matters
    torch.testing.assert_close(ScaledKL(same, first, 1e3, 0.3).loss(q), KL(same, 0.3).loss(q), rtol=1e-12, atol=0)


def tasks(generator, n=120):
    """Two tasks of one head, with noisy labels."""
    found = []
    for k in range(2):
        x = torch.randn(1, n, 3, generator=generator, dtype=F64)
        y = (x[:, :, k] + 0.3 * x[:, :, 2] + torch.randn(1, n, generator=generator, dtype=F64) > 0).long()
        found.append(TaskData(x, y, 0, task=k))
    return found


def test_strength_1_is_vcl_and_another_is_not(generator):
    def end(method, **given):
        run = learned(
            method, stream, network=evcl.nn.mlp(3, [6]), features=6, usual={}, epochs=4, batch_size=40, **given
        )
        return run.network.posterior.mean

    stream = tasks(generator)
    one, some, more = (end("gvcl", strength=strength) for strength in (1.0, 5.0, 50.0))
    vcl, naive = end("vcl"), end("naive")
    torch.testing.assert_close(one, vcl, rtol=1e-6, atol=1e-8)
    for a, b in ((one, some), (some, more), (one, more), (some, naive), (more, naive)):
        assert (a - b).abs().max() > 1e-3


NODES, WEIGHTS = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(30))


def minimised(loss, *start):
    """The minimum of a smooth function of several tensors."""
    leaves = [one.clone().requires_grad_() for one in start]
    optimiser = torch.optim.LBFGS(leaves, max_iter=500, tolerance_grad=1e-11, line_search_fn="strong_wolfe")

    def closure():
        optimiser.zero_grad()
        total = loss(*leaves)
        total.backward()
        return total

    for _ in range(4):
        optimiser.step(closure)
    return [leaf.detach() for leaf in leaves]


def nll(task, mean, log_std=None):
    """The mean NLL of logistic regression [1, 3], or its expectation over Gaussian weights, by quadrature."""
    sign, x = 2 * task.y[0] - 1, task.x[0]
    logit = (x * mean).sum(1, keepdim=True)
    if log_std is not None:
        logit = logit + (x.square() * (2 * log_std).exp()).sum(1, keepdim=True).sqrt() * NODES
    losses = torch.nn.functional.softplus(-sign.unsqueeze(1) * logit)
    return (losses.mean(0) * (1.0 if log_std is None else WEIGHTS / WEIGHTS.sum())).sum()


def test_as_beta_falls_it_becomes_online_ewc(generator):
    """Logistic regression, exactly: the second task ends where EWC with the same strength leads it."""
    first, second = tasks(generator)
    zero, one, n = torch.zeros(1, 3, dtype=F64), torch.ones(1, 3, dtype=F64), first.y.numel()
    (anchor,) = minimised(lambda theta: nll(first, theta), zero)
    p = (first.x[0] @ anchor[0]).sigmoid()
    fisher = (p * (1 - p)) @ first.x[0].square() / n

    def ewc(strength):
        def loss(theta):
            return nll(second, theta) + strength / 2 * (fisher * (theta - anchor).square()).sum()

        return minimised(loss, anchor)[0]

    def gvcl(strength, beta):
        q = Gaussian(zero, zero)  # the first prior
        for task in (first, second):
            term = ScaledKL(q, one, strength, 1.0)

            def loss(mean, log_std, task=task, term=term):
                return n / beta * nll(task, mean, log_std) + term.loss(Gaussian(mean, log_std)).sum()

            q = Gaussian(*minimised(loss, q.mean, q.log_std))
        return q.mean

    for strength in (1.0, 10.0):
        wanted = ewc(strength)
        far, nearer, near = ((gvcl(strength, beta) - wanted).abs().max().item() for beta in (1.0, 0.1, 0.001))
        assert far > 5 * nearer > 25 * near
        assert near < 1e-3
    assert (ewc(1.0) - ewc(10.0)).abs().max() > 0.1
