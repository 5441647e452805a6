from __future__ import annotations

import pytest
import torch
from checks import refused, run_of

import evcl
from evcl._core.settings import resolve
from evcl.methods import KL, METHODS, Elastic, collapse
from evcl.nn import Gaussian
from evcl.training import Observer, TaskData
from evcl.training.rules import Update

F64 = torch.float64


def settings(**given):
    usual = {"lr": 0.005, "std_update": "natural", "std_rate": 0.01}
    return resolve("vcl", METHODS["vcl"].known_settings, {**usual, **given})


def stepping(prior, log_std, weight, dtype=F64, **given):
    """(the posterior, its variance, gradients to be set, the update), with means of 0 and one sigma."""
    q = Gaussian(torch.zeros_like(prior.mean), torch.full_like(prior.mean, log_std))
    variance, grads = q.variance(), torch.zeros(2, *prior.mean.shape, dtype=dtype)
    return q, variance, grads, Update(q, variance, grads, KL(prior, weight).springs(), settings(**given))


def prior_of(n, dtype=F64):
    return Gaussian(torch.zeros(1, n, dtype=dtype), torch.full((1, n), -1.5, dtype=dtype))


class Noted(Observer):
    def __init__(self, seen):
        self.seen = seen

    def end_epoch(self, progress):
        self.seen.append(progress)


def test_a_natural_step_ends_at_the_optimum_of_its_curvature(generator):
    """1/sigma^2 = 1/sigma_p^2 + N/beta H, the curvature H being measured with noise."""
    prior, weight, curvature = prior_of(50), 1e-3, torch.linspace(0, 2, 50, dtype=F64).unsqueeze(0)
    q, variance, grads, update = stepping(prior, -8.0, weight)
    for _ in range(5000):
        grads[1] = curvature * (1 + 0.1 * torch.randn(1, 50, generator=generator, dtype=F64))
        update()
    wanted = 1 / (1 / prior.variance() + curvature / weight)
    torch.testing.assert_close(variance, wanted, rtol=0.05, atol=0)
    torch.testing.assert_close(q.variance(), variance, rtol=1e-12, atol=0)


def test_the_curvature_of_the_first_steps_counts_little_in_the_end():
    """Step t counts t times: the first fifth of the steps has the weight 1/25."""
    _, _, grads, update = stepping(prior_of(3), -5.0, 1e-3, std_rate=1e-12)  # sigma stays, so all count by their time
    for t in range(1, 501):
        grads[1] = 26.0 if t <= 100 else 1.0
        update()
    found = update.log_std.measured / update.log_std.mean_variance
    torch.testing.assert_close(found, torch.full_like(found, 1 + 25 * (100 * 101) / (500 * 501)), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("rows", "tempering"), [(20, 1.0), (130, 0.3)])
def test_sigma_ends_at_the_optimum_of_a_linear_gaussian_model(rows, tempering):
    """By the defaults, however short the task: 1/sigma^2 = 1/sigma_p^2 + sum x^2 / (beta v)."""
    ratios = []
    for seed in range(2):
        x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
        learner = evcl.Learner(torch.nn.Identity(), "vcl", seed=seed, likelihood="gaussian", tempering=tempering)
        learner.learn(x, x.sum(1) + 0.5 * torch.randn(rows, generator=torch.Generator().manual_seed(seed + 9)))
        network = learner.state.run.network
        noise = network.number_head(0).beside.double().exp()
        prior = (-2 * network.first_log_std("auto", network.posterior.mean)).exp().double()
        squares = torch.cat([x.square().sum(0), torch.tensor([float(rows)])]).double()
        optimum = (prior + squares / (tempering * noise)).rsqrt()
        ratios.append(network.posterior.log_std.double().exp() / optimum)
    ratio = torch.cat(ratios)
    assert 0.98 < float(ratio.mean()) < 1.02
    assert float((ratio - 1).abs().max()) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_measurements_made_while_sigma_was_small_do_not_hide_the_others(dtype, generator):
    """Their noise grows as 1/sigma. In a plain mean it stays: the curvature would be off by as much as it is."""
    prior, weight, curvature = prior_of(200, dtype), 1e-3, torch.linspace(0.5, 2, 200, dtype=dtype).unsqueeze(0)
    _, variance, grads, update = stepping(prior, -10.0, weight, dtype)
    for _ in range(1000):
        grads[1] = curvature + 0.03 / variance.sqrt() * torch.randn(1, 200, generator=generator, dtype=dtype)
        update()
    wanted = 1 / (1 / prior.variance() + curvature / weight)
    torch.testing.assert_close(variance, wanted, rtol=0.25, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_curvature_that_is_lost_in_noise_widens_no_sigma(dtype, generator):
    """Measured below 0 or above, it is known no better than its size: sigma stays as narrow as that says."""
    prior = prior_of(1000, dtype)
    _, variance, grads, update = stepping(prior, -4.0, 1e-6, dtype, std_rate=0.1)
    for _ in range(300):
        grads[1] = torch.randn(1, 1000, generator=generator, dtype=dtype)
        update()
    below = update.log_std.measured < 0
    assert variance[below].median() < 0.1 * prior.variance().median()
    torch.testing.assert_close(variance[below].log().mean(), variance[~below].log().mean(), rtol=0, atol=0.3)


def test_a_natural_step_rests_where_the_objective_does(generator):
    """With an elastic term too: at the resting point the gradient of the whole objective is 0."""
    draw = lambda: torch.rand(1, 30, generator=generator, dtype=F64)  # noqa: E731
    prior = Gaussian(draw(), -2 - draw())
    terms = [KL(prior, 1e-2), Elastic(prior, 3 * draw())]
    q = Gaussian(prior.mean.clone(), torch.full((1, 30), -4.0, dtype=F64))
    variance, grads, curvature = q.variance(), torch.zeros(2, 1, 30, dtype=F64), draw()
    update = Update(q, variance, grads, collapse(terms)[0], settings(std_rate=0.1))
    for _ in range(2000):
        grads[1] = curvature
        update()
    log_std = q.log_std.clone().requires_grad_()
    loss = (0.5 * curvature * (2 * log_std).exp()).sum()
    loss = loss + sum(term.loss(Gaussian(q.mean, log_std)).sum() for term in terms)
    (gradient,) = torch.autograd.grad(loss, log_std)
    assert gradient.abs().max() < 1e-8


def test_a_natural_step_needs_a_kl():
    data = torch.rand(8, 4, generator=torch.Generator().manual_seed(0)), [0, 1] * 4
    bare = evcl.methods.Method("bare", "", bayesian=True)
    for method, given, message in (
        ("evcl", {"tempering": 0}, "needs tempering above 0"),
        (bare, {}, "needs a method with a closed-form KL term"),
    ):
        with refused(message):
            evcl.Learner(evcl.nn.mlp(4, [3]), method, std_update="natural", **given).learn(data)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("rule", ["adam", "natural"])
def test_a_replica_stops_before_certainty_and_the_others_go_on(rule, dtype):
    """By itself a replica that stops is the same as one that was never to go further."""
    x = torch.randn(1, 64, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = (x[..., 0] > 0).long()

    def trained(stops, epochs):
        given = {"std_update": rule, "epochs": epochs, "batch_size": 16, "lr": 1e-2, "lr_schedule": "constant"}
        given["std_rate"] = 0.01  # by itself it would follow the number of epochs
        each, seen = [{**given, "stop_nll": stop} for stop in stops], []
        run = run_of("evcl", evcl.nn.mlp(6, [8]), each, range(len(stops)), (8, [2]), dtype=dtype)
        run.learn([TaskData(x, y, 0)], observer=Noted(seen))
        return run.network.posterior.mean, seen

    mean, seen = trained([0.3, 0.0], 30)
    below = [float(p.nll[0]) < 0.3 for p in seen]
    assert any(below)
    assert len(seen) == 30
    stopped, _ = trained([0.0, 0.0], below.index(True) + 1)
    torch.testing.assert_close(mean[0], stopped[0], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(mean[1], stopped[1], atol=1e-3)
    _, seen = trained([0.3, 0.3], 30)
    assert len(seen) < 30


def test_one_that_stopped_goes_on_with_the_next_task():
    """Each replica with its own learning rate."""
    x = torch.randn(1, 64, 6, generator=torch.Generator().manual_seed(0))
    each = [{"epochs": 5, "lr": lr, "stop_nll": stop} for lr, stop in ((1e-2, 10.0), (1e-3, 0.0))]
    run = run_of("ewc", evcl.nn.mlp(6, [8]), each, range(2), (8, [2]))
    for k in range(2):
        before = run.network.posterior.mean.clone()
        run.learn([TaskData(x, (x[..., k] > 0).long(), 0)])
        assert (run.network.posterior.mean != before).any(1).all()


def test_settled_sigmas_are_at_the_optimum_of_the_whole_objective(generator):
    """With an elastic term too: there the natural step rests."""
    draw = lambda: torch.rand(1, 30, generator=generator, dtype=F64)  # noqa: E731
    prior = Gaussian(draw(), (0.1 + draw()).log())
    pull, _ = collapse([KL(prior, 0.01), Elastic(Gaussian(draw(), (0.1 + draw()).log()), draw())])
    q, curvature = Gaussian(draw(), draw().log()), draw()
    variance, grads = q.variance(), torch.zeros(2, 1, 30, dtype=F64)
    update = Update(q, variance, grads, pull, settings(std_rate=1.0))
    update.log_std.settle(curvature, pull)
    settled = q.log_std.clone()
    variance.copy_(q.variance())
    grads[1] = curvature
    update()
    torch.testing.assert_close(q.log_std, settled, rtol=1e-9, atol=1e-9)
