"""VOGN, IVON, the Kalman filter and noisy K-FAC do what their equations say: by plain torch, in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import small_runs
import torch
import torch.nn.functional as F
from small_runs import F64, INPUTS, Handed
from torch import nn
from torch.autograd.functional import jacobian
from torch.nn.utils import skip_init

import evcl
from evcl._core.randomness import generator
from evcl._core.settings import resolve
from evcl.curvature import Sample, StepCurvature, fisher
from evcl.methods import METHODS, Spring, Springs, TaskData
from evcl.methods.ivon import IvonRule
from evcl.methods.noisy_kfac import LayerPosterior, damped
from evcl.nn import Gaussian, Layout
from evcl.nn.chain import find_chain
from evcl.posterior.kronecker import Block
from evcl.targets.likelihood import Likelihood
from evcl.training import Pool

N = 20
USUAL = {"lr_schedule": "constant", "batch_size": N, "prior_std": 0.5, "init_std": 0.2}
run_of = partial(small_runs.run_of, hidden=(4,), heads=(3,), usual=USUAL)
logistic = partial(run_of, network=nn.Flatten(), features=INPUTS)  # a head alone


def task(number, examples=N, head=0):
    return small_runs.task(number, head, examples, classes=3)


def logits(run, theta, x):
    """The outputs for x [n, inputs] with the weights theta [P] of a network with one head."""
    views = run.network.layout.views(theta)
    for name in [n for n in views if n.endswith("weight")]:
        last = name.startswith("head")
        x = x @ views[name].mT + views[name.removesuffix("weight") + "bias"]
        x = x if last else x.relu()
    return x


def gradients(run, theta, x, y):
    """[n, P]: the gradient of each example's NLL."""
    return jacobian(lambda at: F.cross_entropy(logits(run, at, x), y, reduction="none"), theta)


def fisher_rows(run, theta, x):
    """[n C, P]: sqrt(p_c) d log p_c / d theta of each example and class, whose outer products add up to the Fisher."""
    roots = logits(run, theta, x).softmax(1).sqrt()
    return (roots.unsqueeze(2) * jacobian(lambda at: logits(run, at, x).log_softmax(1), theta)).flatten(0, 1)


def start(run):
    q = run.network.posterior
    return q.mean[0].clone(), (2 * q.log_std[0]).exp()


# --- gradients of single examples ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["empirical", "exact"])
@pytest.mark.parametrize("weights", [False, True])
def test_a_steps_curvature_is_that_of_its_examples_one_by_one(kind, weights):
    run, one = run_of("vogn", replicas=2), task(0)
    one = replace(one, weights=torch.linspace(0.5, 1.5, N, dtype=F64).unsqueeze(0)) if weights else one
    layout, theta = run.network.layout, run.network.posterior.mean
    rows = torch.stack([torch.arange(7), torch.arange(7) + 5])
    gradient, squares = torch.empty_like(theta), torch.empty_like(theta)
    found = StepCurvature(run.network, layout, Pool([one], run.classes, 2), kind)(
        theta, rows, gradient, squares, Handed()
    )
    for r in range(2):
        x, y = one.x[0, rows[r]], one.y[0, rows[r]]
        u = torch.ones(7, dtype=F64) if one.weights is None else one.weights[0, rows[r]]
        each = gradients(run, theta[r], x, y)
        nll = F.cross_entropy(logits(run, theta[r], x), y, reduction="none")
        torch.testing.assert_close(found[r], (u * nll).mean())
        torch.testing.assert_close(gradient[r], (u.unsqueeze(1) * each).mean(0))
        if kind == "empirical":
            wanted = (u.unsqueeze(1) * each.square()).mean(0)
        else:
            wanted = (u.repeat_interleave(3).unsqueeze(1) * fisher_rows(run, theta[r], x).square()).sum(0) / 7
        torch.testing.assert_close(squares[r], wanted)
    assert float(squares.min()) >= 0
    assert float((squares - gradient.square()).abs().max()) > 1e-3  # not the square of the mean


def test_of_two_heads_each_example_uses_its_own():
    run = run_of("vogn", heads=(3, 3))
    both = [task(0, 6), task(1, 4, head=1)]
    pool = Pool(both, run.classes)
    layout = run.network.layout.part(run.network.names_of([0, 1]))
    theta = run.network.layout.gather(run.network.posterior.mean, layout)
    found = [torch.empty_like(theta) for _ in range(2)]
    StepCurvature(run.network, layout, pool, "exact")(theta, torch.arange(10).unsqueeze(0), *found, Handed())
    parts = [torch.empty_like(theta) for _ in range(2)]
    wanted = torch.zeros_like(theta)
    for k, one in enumerate(both):
        own = run.network.layout.part(run.network.names_of([k]))
        alone = layout.gather(theta, own)
        parts = [torch.empty_like(alone) for _ in range(2)]
        rows = torch.arange(one.y.shape[1]).unsqueeze(0)
        StepCurvature(run.network, own, Pool([one], run.classes), "exact")(alone, rows, *parts, Handed())
        whole = torch.zeros_like(theta)
        layout.scatter_(whole, own, parts[1] * one.y.shape[1] / 10)
        wanted += whole
    torch.testing.assert_close(found[1], wanted)


# --- VOGN and IVON ---------------------------------------------------------------------------------------------------

GIVEN = {"lr": 0.02, "momentum": 0.8, "curvature_rate": 0.2, "tempering": 0.3, "epochs": 3}


@pytest.mark.parametrize("chain", [True, False])
def test_vogn_is_what_plain_torch_makes_of_its_equations(chain):
    """By the written training pass of a chain, and by that of any network."""
    run, noise, ours = run_of("vogn", draws=2, **GIVEN), Handed(), Handed()
    if not chain:
        run.network.trunk.append(nn.Identity())
    assert (find_chain(run.network, task(0).x) is not None) == chain
    mu, v = start(run)
    prior_mean, prior_v = torch.zeros_like(mu), torch.full_like(mu, 0.25)
    for k in range(2):
        one = task(k)
        run.learn([one], noise=noise)
        m = s = torch.zeros_like(mu)
        d = 0.3 / (N * prior_v)
        for step in range(1, 4):
            found = []
            for _ in range(2):
                theta = mu + v.sqrt() * ours.normal_(torch.empty(1, len(mu), dtype=F64))[0]
                found.append(gradients(run, theta, one.x[0], one.y[0]))
            g = torch.stack(found).mean((0, 1))
            h = torch.stack(found).square().mean((0, 1))
            m = 0.8 * m + 0.2 * (g + d * (mu - prior_mean))
            s = 0.8 * s + 0.2 * h
            stiff = s / (1 - 0.8**step) + d
            mu, v = mu - 0.02 * m / (1 - 0.8**step) / stiff, 0.3 / N / stiff
        prior_mean, prior_v = mu, v
        torch.testing.assert_close(run.network.posterior.mean[0], mu, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(run.network.posterior.variance()[0], v, rtol=1e-8, atol=1e-12)


def test_ivon_is_what_plain_torch_makes_of_its_equations():
    run, noise, ours = run_of("ivon", first_curvature=0.05, **GIVEN), Handed(), Handed()
    mu, v = start(run)
    prior_mean, prior_v = torch.zeros_like(mu), torch.full_like(mu, 0.25)
    for k in range(2):
        one = task(k)
        run.learn([one], noise=noise)
        m, h = torch.zeros_like(mu), torch.full_like(mu, 0.05)
        empty = h  # without data
        d = 0.3 / (N * prior_v)
        for step in range(1, 4):
            theta = mu + v.sqrt() * ours.normal_(torch.empty(1, len(mu), dtype=F64))[0]
            g = gradients(run, theta, one.x[0], one.y[0]).mean(0)
            seen = g * (theta - mu) / v
            m = 0.8 * m + 0.2 * g
            h = 0.8 * h + 0.2 * seen + 0.2**2 * (h - seen) ** 2 / (2 * (h + d))
            mu = mu - 0.02 * (m / (1 - 0.8**step) + d * (mu - prior_mean)) / (h + d)
            v = 0.3 / (N * (h + d))
            empty = 0.8 * empty + 0.2**2 * empty**2 / (2 * (empty + d))
        assert float((h - empty).min()) < 0 < float((h - empty).max())  # the end keeps h where it is below 0
        v = 0.3 / (N * (torch.where(h < 0, h, (h - empty).clamp_min(0)) + d))
        prior_mean, prior_v = mu, v
        torch.testing.assert_close(run.network.posterior.mean[0], mu, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(run.network.posterior.variance()[0], v, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("method", ["vogn", "ivon"])
@pytest.mark.parametrize("epochs", [1, 10])
def test_a_weight_without_data_ends_at_its_priors_sigma(method, epochs):
    """Of two tasks whose input 2 is always 0, however few steps they have; the other weights become narrower."""
    run = run_of(method, tempering=0.3, epochs=epochs)
    for k in range(2):
        one = task(k)
        one.x[:, :, 2] = 0.0
        run.learn([one])
    std = run.network.layout.view(run.network.posterior.log_std, "1.weight")[0].exp()  # [4, INPUTS]
    torch.testing.assert_close(std[:, 2], torch.full_like(std[:, 2], 0.5), rtol=1e-9, atol=0)
    assert float((std - 0.5).abs().max()) > 1e-3


@pytest.mark.parametrize("rate", [0.01, 0.5, 1.0])
def test_ivons_curvature_stays_above_minus_the_damping(rate):
    """Even if every estimate says that it is far below."""
    known = METHODS["ivon"].known_settings
    s = resolve("ivon", known, {"lr": 0.02, "curvature_rate": rate})
    mean, one = torch.zeros(1, 50, dtype=F64), torch.ones(1, 50, dtype=F64)
    damping = torch.logspace(-6, 1, 50, dtype=F64).unsqueeze(0)
    grads = torch.zeros(2, 1, 50, dtype=F64)
    q = Gaussian(mean, torch.zeros_like(mean))
    rule = IvonRule(q, one.clone(), grads, Springs(Spring(damping, mean), Spring(damping, one)), s, None)
    for step in range(20):
        before = rule.curvature + damping
        grads[1] = -(10.0 ** (step % 5)) * damping
        rule.begin(1)
        rule()
        assert bool((rule.curvature + damping >= before / 2 * (1 - 1e-9)).all())
        assert bool((rule.variance > 0).all())
    assert bool((rule.curvature < 0.03).any())


# --- the Kalman filter -----------------------------------------------------------------------------------------------


def order(number, epoch, n=N):
    return torch.randperm(n, generator=generator(0, "order", number, epoch))


@pytest.mark.parametrize("inner", [1, 2])
@pytest.mark.parametrize("epochs", [1, 2])
def test_the_diagonal_filter_is_a_loop_over_batches(inner, epochs):
    """The last batch is smaller; the belief after a task is that before the next one."""
    run = run_of("ekf", batch_size=8, inner_steps=inner, epochs=epochs)
    mu, precision = run.network.posterior.mean[0].clone(), torch.full((run.network.layout.size,), 4.0, dtype=F64)
    for k in range(2):
        one = task(k)
        run.learn([one])
        for epoch in range(epochs):
            for rows in order(k, epoch).split(8):
                x, y, before, at = one.x[0, rows], one.y[0, rows], mu, precision
                for i in range(inner):
                    g = gradients(run, mu, x, y).sum(0) / epochs
                    fisher = fisher_rows(run, mu, x).square().sum(0) / epochs
                    precision = at + fisher
                    new = before + (fisher * (mu - before) - g) / precision
                    mu = mu + (new - mu) / (i + 1)
        torch.testing.assert_close(run.network.posterior.mean[0], mu, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(1 / run.network.posterior.variance()[0], precision, rtol=1e-8, atol=1e-10)


class UnitNoise(Likelihood):
    """y = output + noise of variance 1: regression."""

    name = "unit noise"

    def nll(self, outputs, y, columns):
        return 0.5 * (outputs - y).square().sum(1)

    def fisher_targets(self, outputs, y, weights, how):
        return [one.sum() for one in outputs.unbind(2)]  # the Fisher is J^T J


@pytest.mark.parametrize("batch_size", [1, 3, N])
@pytest.mark.parametrize("whole", [True, False])
def test_of_linear_regression_it_is_the_exact_posterior(whole, batch_size, generator):
    """Over two tasks, whatever the batches: that of all rows at once. With a diagonal precision, it is the filter that
    keeps the diagonal after each batch.
    """
    run = logistic("ekf", heads=(1,), batch_size=batch_size, rank=INPUTS + 1 if whole else 0)
    run.likelihood = UnitNoise()
    mean, before = run.network.posterior.mean[0].clone(), 4 * torch.eye(INPUTS + 1, dtype=F64)
    seen, mu, precision = [], mean, before
    for k in range(2):
        x = torch.randn(1, N, INPUTS, generator=generator, dtype=F64)
        y = x[:, :, :1] - 2 * x[:, :, 1:2] + torch.randn(1, N, 1, generator=generator, dtype=F64)
        run.learn([TaskData(x, y, 0, task=k)])
        design = torch.cat([x[0], torch.ones(N, 1, dtype=F64)], 1)
        seen.append((design, y[0, :, 0]))
        if whole:
            a, b = (torch.cat(parts) for parts in zip(*seen, strict=True))
            precision = before + a.mT @ a
            mu = torch.linalg.solve(precision, before @ mean + a.mT @ b)
        else:
            for rows in order(k, 0).split(batch_size):
                a, b = design[rows], y[0, rows, 0]
                precision = precision + torch.diag(a.square().sum(0))
                mu = mu + torch.linalg.solve(precision, a.mT @ (b - a @ mu))
        torch.testing.assert_close(run.network.posterior.mean[0], mu, rtol=1e-8, atol=1e-9)
        wanted = torch.linalg.inv(precision).diagonal()
        torch.testing.assert_close(run.network.posterior.variance()[0], wanted, rtol=1e-8, atol=1e-9)


def test_the_kalman_filters_first_prior_is_centred_on_the_initial_weights():
    """Where there are no data, it is what is left; other methods are centred on 0."""
    run = run_of("ekf", prior_std=0.7)
    initial = run.network.posterior.mean.clone()
    silent = task(0)
    silent.x[:, :, 0] = 0  # nothing is learned about the weights from this input
    run.learn([silent])
    q, view = run.network.posterior, run.network.layout.view
    name = next(iter(run.network.layout.shapes))
    found, before = view(q.mean, name)[0], view(initial, name)[0]
    assert torch.equal(found[:, 0], before[:, 0])
    assert not torch.equal(found[:, 1], before[:, 1])
    torch.testing.assert_close(view(q.log_std, name)[0, :, 0].exp(), torch.full_like(found[:, 0], 0.7))


@pytest.mark.parametrize("rank", [1, 4])
def test_a_low_rank_keeps_the_diagonal_of_the_precision(rank):
    """One batch: whatever the rank, the diagonal is that of prior plus Fisher, and the means are the exact ones."""
    run = run_of("ekf", rank=rank)
    before = run.network.posterior.mean[0].clone()
    one = task(0)
    run.learn([one])
    rows, spread = torch.stack(run.memory.rows, 1), run.memory.belief.variance()
    assert rows.shape[1] == rank
    found = fisher_rows(run, before, one.x[0])
    torch.testing.assert_close(1 / spread[0] + rows[0].square().sum(0), 4 + found.square().sum(0))
    whole = 4 * torch.eye(len(before), dtype=F64) + found.mT @ found
    wanted = before - torch.linalg.solve(whole, gradients(run, before, one.x[0], one.y[0]).sum(0))
    torch.testing.assert_close(run.network.posterior.mean[0], wanted)
    best = torch.linalg.svdvals(found)[:rank].square().sum()
    torch.testing.assert_close(rows.square().sum(), best)


def test_a_head_that_a_task_does_not_use_keeps_its_precision():
    run = run_of("ekf", rank=3, batch_size=5, heads=(3, 3))

    def diagonal():
        found = 1 / run.memory.belief.variance()[0] + torch.stack(run.memory.rows, 1)[0].square().sum(0)
        return run.network.layout.view(found, "head 0.weight"), found

    run.learn([task(0)])
    (head, before), mean = diagonal(), run.network.posterior.mean.clone()
    run.learn([task(1, head=1)])
    assert float(head.max()) > 4.5
    torch.testing.assert_close(diagonal()[0], head)
    for name in ("head 0.weight", "head 0.bias"):
        assert torch.equal(*(run.network.layout.view(t, name) for t in (run.network.posterior.mean, mean)))
    trunk = run.network.layout.spans["1.weight"]
    assert bool((diagonal()[1][trunk] >= before[trunk] * (1 - 1e-12)).all())
    run.learn([task(2)])
    assert bool(run.network.posterior.log_std.isfinite().all())


@pytest.mark.parametrize("rank", [0, 2])
def test_the_filter_can_use_coresets(rank):
    learner = evcl.Learner(evcl.nn.mlp(INPUTS, [4]), "ekf", rank=rank, coreset="random", coreset_size=5)
    for k in range(2):
        learner.learn((task(k).x[0].float(), task(k).y[0]), str(k))
    assert learner.predict(task(0).x[0].float(), task="0").shape == (N,)


@pytest.mark.parametrize("rank", [0, 3])
def test_replicas_of_the_filter_are_as_alone(rank):
    two, alone = (run_of("ekf", replicas=replicas, rank=rank, batch_size=6) for replicas in (2, 1))
    for k in range(2):
        for run in (two, alone):
            run.learn([task(k)])
    for name, found in alone.tensors().items():
        same = two.tensors()[name][:1]
        if "rows" in name:  # eigenvectors, whose signs are arbitrary
            same, found = same.abs(), found.abs()
        torch.testing.assert_close(same, found, rtol=1e-9, atol=1e-9)


# --- noisy K-FAC, by whole Kronecker matrices ------------------------------------------------------------------------


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
