"""Noisy K-FAC does what its equations say: by whole Kronecker matrices and plain torch, in float64."""

from __future__ import annotations

import pytest
import torch
from small_runs import F64, INPUTS, Handed
from test_natural import N, gradients, run_of, start, task
from torch import nn
from torch.nn.utils import skip_init

import evcl
from evcl.curvature import Sample, fisher
from evcl.methods.noisy_kfac import LayerPosterior, damped
from evcl.nn import Layout
from evcl.posterior.kronecker import Block

BETA, PRIOR = 0.3, 0.25  # the variance of the first prior is that of `run_of`


def layers(run):
    """The places of each layer's [W, b] among the weights: [o, i + 1] each."""
    views = run.network.layout.views(torch.arange(run.network.layout.size))
    weights = [name for name in views if name.endswith("weight")]
    return [torch.cat([views[w], views[w.removesuffix("weight") + "bias"].unsqueeze(1)], 1) for w in weights]


def factors(run, theta, x):
    """A and G of each layer of a network with relus, for x [n, inputs]."""
    inputs, outputs = [], []
    for places in layers(run):
        inputs.append(torch.cat([x.detach(), torch.ones(len(x), 1, dtype=F64)], 1))
        weights = theta[places]
        outputs.append((x @ weights[:, :-1].mT + weights[:, -1]).requires_grad_())
        x = outputs[-1].relu()
    log_p = outputs[-1].log_softmax(1)
    found = [torch.zeros(o.shape[1], o.shape[1], dtype=F64) for o in outputs]
    for c in range(log_p.shape[1]):
        for total, g in zip(found, torch.autograd.grad(log_p[:, c].sum(), outputs, retain_graph=True), strict=True):
            total += (log_p[:, c].detach().exp().unsqueeze(1) * g).mT @ g / len(x)
    return [(a.mT @ a / len(a), g) for a, g in zip(inputs, found, strict=True)]


def whole(a, g, c2):
    """G_d (x) A_d, and L_G (x) L_A."""
    pi, c = (a.diagonal().mean() / g.diagonal().mean()).sqrt(), c2**0.5
    a, g = a / pi + c * torch.eye(len(a), dtype=F64), pi * g + c * torch.eye(len(g), dtype=F64)
    roots = [torch.linalg.inv(torch.linalg.cholesky(f)).mT for f in (g, a)]
    return torch.kron(g, a), torch.kron(*roots)


def nearest(pairs):
    """The nearest Kronecker product to a sum of them, by a singular value decomposition (Van Loan, 2000)."""
    u, s, v = torch.linalg.svd(sum(torch.outer(a.flatten(), g.flatten()) for a, g in pairs))
    found = [f.view_as(like) * s[0].sqrt() for f, like in zip((u[:, 0], v[0]), pairs[0], strict=True)]
    return [f * f.trace().sign() for f in found]


@pytest.mark.parametrize(("factor_every", "inverse_every", "clip"), [(1, 1, 1e6), (2, 3, 1e6), (1, 1, 0.002)])
def test_it_is_what_plain_torch_makes_of_its_equations(factor_every, inverse_every, clip):
    given = {"lr": 0.05, "tempering": BETA, "factor_rate": 0.3, "epochs": 4, "clip": clip}
    run, noise, ours = (
        run_of("noisy-kfac", factor_every=factor_every, inverse_every=inverse_every, **given),
        Handed(),
        Handed(),
    )
    (mu, v), places = start(run), layers(run)
    w, anchor, old, clipped, posteriors = BETA / N, torch.zeros_like(mu), [None] * len(places), [], []
    for k in range(2):
        one = task(k)
        run.learn([one], noise=noise)
        seen = []
        for step in range(4):
            z = ours.normal_(torch.empty(1, len(mu), dtype=F64))[0]
            theta = mu + v.sqrt() * z
            for at, posterior in zip(places, posteriors, strict=True) if step else ():
                theta[at] = (mu[at].flatten() + w**0.5 * posterior[1] @ z[at].flatten()).view_as(at)
            if step % factor_every == 0:
                seen.append(factors(run, theta, one.x[0]))
            weights = torch.tensor([0.7 ** (len(seen) - 1 - j) for j in range(len(seen))], dtype=F64)
            weights = weights / weights.sum()
            mean = [
                [sum(c * s[i][j] for c, s in zip(weights, seen, strict=True)) for j in (0, 1)]
                for i in range(len(places))
            ]
            if step % inverse_every == 0:
                posteriors = [
                    whole(*(new if before is None else nearest([before, new])), w / PRIOR)
                    for before, new in zip(old, mean, strict=True)
                ]
            g, change = gradients(run, theta, one.x[0], one.y[0]).mean(0), torch.zeros_like(mu)
            for at, before, posterior in zip(places, old, posteriors, strict=True):
                moved = (mu - anchor)[at].flatten()
                g[at] += (w / PRIOR * moved if before is None else whole(*before, w / PRIOR)[0] @ moved).view_as(at)
                change[at] = torch.linalg.solve(posterior[0], g[at].flatten()).view_as(at)
            size = 0.05**2 * (g @ change)
            clipped.append(float(size) > clip)
            mu = mu - 0.05 * change * min(1.0, float(clip / size) ** 0.5)
            for at, posterior in zip(places, posteriors, strict=True):
                v[at] = w * torch.linalg.inv(posterior[0]).diagonal().view_as(at)
        torch.testing.assert_close(run.network.posterior.mean[0], mu, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(run.network.posterior.variance()[0], v, rtol=1e-6, atol=1e-10)
        old = [
            (a, g) if before is None else nearest([before, (a, g)]) for before, (a, g) in zip(old, mean, strict=True)
        ]
        anchor = mu
    assert any(clipped) == (clip < 1)


# --- one layer's matrix normal ---------------------------------------------------------------------------------------


def posterior_of(table, generator, replicas):
    """A layer with 4 inputs and a bias, or a table of 5 rows; 3 outputs."""
    layout = Layout({"weight": (5, 3) if table else (3, 4), "bias": (3,)})
    block = Block("weight", slice(None), None if table else "bias", slice(None), table)
    prior = torch.full((replicas, 1, 1, 1), 0.05, dtype=F64)
    one = LayerPosterior(block, layout, torch.zeros(replicas, layout.size, dtype=F64), None, prior)
    roots = [torch.randn(size, 2, generator=generator, dtype=F64) for size in (5, 3)]
    a, g = (root @ root.mT for root in roots)
    a = a.diag() if table else a
    one.a.copy_(a)
    one.g.copy_(g)
    one.refresh()
    a, g = (f[0, 0] for f in damped(one.a[:1].unsqueeze(1), one.g[:1].unsqueeze(1), prior[:1]))
    return one, layout, torch.linalg.inv(torch.kron(g, a.diag() if table else a))


@pytest.mark.parametrize("table", [False, True])
def test_draws_have_the_covariance_of_the_matrix_normal(table, generator):
    """200,000 draws, each a replica; every entry is within five standard errors."""
    count = 200_000
    one, layout, covariance = posterior_of(table, generator, count)
    draws = one.root.drawn(one.of(torch.randn(count, layout.size, generator=generator, dtype=F64))).flatten(1)
    variances = covariance.diagonal()
    error = ((variances * variances.unsqueeze(1) + covariance.square()) / count).sqrt()
    assert float(((draws.mT @ draws / count - covariance) / error).abs().max()) < 5
    off = covariance - variances.diag()
    assert float((off / error).abs().max()) > 50  # a diagonal covariance would be found out


@pytest.mark.parametrize("table", [False, True])
def test_marginals_and_solutions_are_those_of_the_whole_matrix(table, generator):
    one, layout, covariance = posterior_of(table, generator, 2)
    torch.testing.assert_close(one.root.marginals()[1].flatten(), covariance.diagonal())
    flat = torch.randn(2, layout.size, generator=generator, dtype=F64)
    d = one.block.matrix(layout, flat, 3)[1].flatten()
    torch.testing.assert_close(one.root.solved(one.of(flat))[1].flatten(), covariance @ d)


# --- from task to task -----------------------------------------------------------------------------------------------

STILL = {"lr": 1e-9, "tempering": BETA, "factor_every": 1, "inverse_every": 1, "epochs": 3}


def test_weights_without_factors_have_a_diagonal_precision():
    """Those of a norm: N h / beta of every task, and the first prior's."""
    network = nn.Sequential(skip_init(nn.Linear, INPUTS, 4), nn.LayerNorm(4), nn.ReLU())
    run = run_of("noisy-kfac", network=network, **STILL)
    layout, precision = run.network.layout, 1 / PRIOR
    for k in range(2):
        one = task(k)
        run.learn([one], noise=Handed(0.0))
        q = run.network.posterior
        found = fisher(Sample(run.network, q.mean, layout, [0], one.x, one.y))
        precision = precision + N / BETA * found
        for name in ("1.weight", "1.bias"):
            wanted = layout.view(precision, name)
            torch.testing.assert_close(1 / layout.view(q.variance(), name), wanted, rtol=1e-5, atol=1e-6)
    assert float((wanted * PRIOR).max()) > 1.1
    assert not layout.view(run.memory.fisher, "0.weight").any()


@pytest.mark.full
@pytest.mark.parametrize("tempering", [0.02, 0.1])
def test_it_forgets_less_than_plain_training(tempering):
    benchmark = evcl.benchmarks.get("permuted-digits", seed=0, tasks=2)

    def ended(method, **given):
        learner = evcl.Learner(evcl.nn.mlp(64, [20]), method, seed=0, epochs=8, batch_size=25, **given)
        for k, one in enumerate(benchmark):
            learner.learn((one.train.x[:250], one.train.y[:250]), str(k), head="0" if k else "new")
        return [learner.measure(one.test, "1").accuracy for one in benchmark]

    first, second = ended("noisy-kfac", tempering=tempering)
    assert first > ended("naive")[0] + 0.1
    assert second > 0.7
