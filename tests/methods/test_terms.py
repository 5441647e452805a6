"""Closed-form gradients against autograd, and what the elastic term does to weights."""

from __future__ import annotations

import pytest
import torch
from small_runs import F64, TASKS, assert_springs, learned, round_of, task

import evcl
from evcl._core.settings import Settings
from evcl.methods import collapse
from evcl.methods.elastic_memory import Elastic
from evcl.methods.terms import Spring
from evcl.methods.vcl import KL
from evcl.nn import Gaussian


def terms_of(run, one, **given):
    """Those of the fit that the run's method asks for first, with these settings."""
    return next(run.method.learn(run.memory, round_of(run, [one]), Settings({**run.settings, **given}))).terms


@pytest.mark.parametrize("name", ["evcl", "vcl", "ewc"])
@pytest.mark.parametrize("per_replica", [False, True])
def test_the_closed_form_is_autograds(name, per_replica, generator):
    run = learned(name, TASKS[:1], replicas=3, **({"fisher_floor": 0.3} if name != "vcl" else {}))
    own = {"strength", "tempering", "fisher_floor"} & run.settings.keys() if per_replica else ()
    given = {setting: torch.tensor([[1.0], [10.0], [0.1]], dtype=F64) for setting in own}
    q = run.network.posterior.map(lambda t: t + torch.randn(t.shape, generator=generator, dtype=F64))
    assert_springs(terms_of(run, TASKS[1], **given), q, rtol=1e-9, atol=1e-12)


def test_a_weight_at_its_centre_feels_exactly_nothing():
    """In float32 too, however stiff the terms: a rounding error here would become a full step of Adam."""
    mean = torch.linspace(-3, 3, 101).unsqueeze(0)
    at = Gaussian(mean, torch.linspace(-9, 1, 101).unsqueeze(0))
    stiff = torch.logspace(-6, 7, 101).unsqueeze(0)
    pull, _ = collapse([KL(at, 1e-3), Elastic(at, stiff)])
    grads, scratch = [torch.zeros_like(mean) for _ in range(2)], [torch.empty_like(mean) for _ in range(2)]
    pull.add_mean_gradient(mean, grads[0], scratch[0])
    pull.add_log_std_gradient(at.variance(), grads[1], *scratch)
    assert all(torch.equal(grad, torch.zeros_like(mean)) for grad in grads)


def test_two_centres_meet_at_the_weighted_mean():
    one = Spring(torch.tensor([[3.0, 0.0]]), torch.tensor([[1.0, 5.0]]))
    two = Spring(torch.tensor([[1.0, 0.0]]), torch.tensor([[9.0, 7.0]]))
    both = one + two
    assert both.w.tolist() == [[4.0, 0.0]]
    assert both.c[0, 0].item() == 3.0
    assert both.c.isfinite().all()


def test_weights_without_data_keep_their_posterior():
    """An input that is always 0: its weights' posterior stays where the first task left it, bit for bit."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(300, 4, generator=source)
    x[:, 2] = 0
    y = (x[:, 0] > 0).long()
    learner = evcl.EVCL(evcl.nn.mlp(4, [8]), epochs=20, tempering=0.01)
    learner.learn((x, y))

    def posterior():
        own = learner.posterior["1.weight"]
        return own.mean[:, 2], own.std[:, 2]

    before = posterior()
    learner.learn((x, 1 - y))
    assert all(torch.equal(a, b) for a, b in zip(before, posterior(), strict=True))


# --- the elastic term is alive --------------------------------------------------------------------------------------


def weights_after_two_tasks(method, **settings):
    benchmark = evcl.benchmarks.get("permuted-digits", seed=0, tasks=2)
    learner = evcl.Learner(evcl.nn.mlp(64, [20]), method, seed=3, epochs=2, **settings)
    for one in benchmark:
        learner.learn(one)
    posterior = learner.parts.run.network.posterior
    return posterior.mean, posterior.log_std


def test_without_strength_evcl_is_vcl_and_with_it_it_is_not():
    vcl, none, some = (
        weights_after_two_tasks("vcl"),
        weights_after_two_tasks("evcl", strength=0, fisher_floor=0, distill=0, one_softmax=True),
        weights_after_two_tasks("evcl", strength=1, fisher_floor=0, distill=0, one_softmax=True),
    )
    assert torch.equal(vcl[0], none[0])
    assert torch.equal(vcl[1], none[1])
    assert (vcl[0] - some[0]).abs().max() > 1e-3
    assert (vcl[1] - some[1]).abs().max() > 1e-5


@pytest.mark.parametrize("name", ["evcl", "ewc"])
def test_a_pull_over_the_examples_is_that_of_so_much_smaller_a_strength(name):
    """Both the Fisher's part and the floor's."""
    run = learned(name, TASKS[:1])

    def importance(n, **given):
        terms = terms_of(run, task(1, 1, n), **{"fisher_scale": "task", **given})
        return next(term.importance for term in terms if isinstance(term, Elastic))

    divided = importance(250, strength=500.0, fisher_floor=50.0, strength_scale="examples")
    torch.testing.assert_close(divided, importance(250, strength=2.0, fisher_floor=0.2))
    torch.testing.assert_close(importance(7, strength=2.0), importance(250, strength=2.0))
