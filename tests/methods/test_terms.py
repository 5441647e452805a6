"""Closed-form gradients against autograd, and what the elastic term does to weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from small_runs import F64, assert_springs

import evcl
from evcl._core.settings import resolve
from evcl.methods import METHODS, Round, TaskData, collapse
from evcl.methods.elastic_memory import Elastic, Memory
from evcl.methods.terms import Spring
from evcl.methods.vcl import KL
from evcl.nn import Gaussian
from evcl.targets import Likelihood


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=F64)


def memory(generator, bayesian, r=3, p=40):
    used = (torch.arange(p) < p // 2).to(F64).expand(r, p)
    prior = Gaussian(draw(generator, r, p), draw(generator, r, p) - 2 if bayesian else None)
    return Memory(prior, draw(generator, r, p).square() * used, used)


def terms_of(method, memory, s, n):
    """Those of the fit that it asks for first, for a task of n examples."""
    task = TaskData(torch.zeros(1, n, 1), torch.zeros(1, n).long(), 0)
    network = SimpleNamespace(classes=lambda head: 2)
    round_ = Round(0, [task], network, memory.prior, (), [0], Likelihood())
    return next(method.learn(memory, round_, s)).terms


@pytest.mark.parametrize("name", ["evcl", "vcl", "ewc"])
@pytest.mark.parametrize("per_replica", [False, True])
def test_the_closed_form_is_autograds(name, per_replica, generator):
    method = METHODS[name]
    past = memory(generator, method.bayesian)
    given = {"fisher_floor": 0.3} if name != "vcl" else {}
    s = dict(resolve(name, method.known_settings, given))
    if per_replica:
        for setting in {"strength", "tempering", "fisher_floor"} & s.keys():
            s[setting] = torch.tensor([[1.0], [10.0], [0.1]], dtype=F64)
    s = evcl._core.settings.Settings(s)
    q = Gaussian(draw(generator, 3, 40), draw(generator, 3, 40) - 1 if method.bayesian else None)
    terms = terms_of(method, past, s, 123)
    assert_springs(terms, q, rtol=1e-10, atol=1e-13)


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
    for task in benchmark:
        learner.learn(task)
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


@pytest.mark.parametrize("method", ["evcl", "ewc"])
def test_a_needed_weight_is_held_and_the_other_is_free(method):
    """Task one reads input 0 and never sees input 1; task two would change the weights of both."""
    x1 = torch.zeros(200, 2)
    x1[:, 0] = torch.linspace(-2, 2, 200)
    y1 = (x1[:, 0] + 0.6 * torch.sin(37 * torch.arange(200.0)) > 0).long()  # not separable, so the Fisher stays
    x2 = torch.linspace(-2, 2, 200).repeat(2, 1).T.contiguous()
    y2 = 1 - y1

    def moved(strength):
        identity = torch.nn.Flatten()  # no trunk: the head is the whole model
        options = {"init_std": 1e-3, "tempering": 1e-6, "std_update": "adam", "distill": 0} if method == "evcl" else {}
        learner = evcl.Learner(identity, method, epochs=60, lr=0.01, strength=strength, **options)
        learner.learn((x1, y1))
        before = learner.mean_network()[1].weight.detach().clone()
        learner.learn((x2, y2), head="0")
        change = (learner.mean_network()[1].weight.detach() - before).abs()
        return change[:, 0].max().item(), change[:, 1].max().item()

    needed, free = moved(strength=1e4)
    assert free > 0.2
    assert needed < free / 10
    needed, free = moved(strength=0)
    assert needed > free / 2


@pytest.mark.parametrize("name", ["evcl", "ewc"])
def test_a_pull_over_the_examples_is_that_of_so_much_smaller_a_strength(name, generator):
    """Both the Fisher's part and the floor's."""
    kept = memory(generator, METHODS[name].bayesian)

    def importance(n, **given):
        s = resolve(name, METHODS[name].known_settings, {"fisher_scale": "task", **given})
        (found,) = (term for term in terms_of(METHODS[name], kept, s, n) if isinstance(term, Elastic))
        return found.importance

    divided = importance(250, strength=500.0, fisher_floor=50.0, strength_scale="examples")
    torch.testing.assert_close(divided, importance(250, strength=2.0, fisher_floor=0.2))
    torch.testing.assert_close(importance(7, strength=2.0), importance(250, strength=2.0))
