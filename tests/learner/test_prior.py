"""A first prior of the user's own."""

from __future__ import annotations

import pytest
import torch
from checks import quietly, refused, same
from torch import nn

import evcl
from evcl.nn import Prior

TASKS = evcl.benchmarks.get("split-digits", tasks=2)


def network():
    return quietly(lambda: nn.Sequential(nn.Linear(64, 12), nn.ReLU()))


def prior(std=0.2, shift=0.0):
    given = {name: p.detach() + shift for name, p in network().named_parameters()}
    return Prior(given, {name: torch.full_like(p, std) for name, p in given.items()})


def flat(learner):
    return learner.state.run.network.posterior.mean.clone()


@pytest.mark.parametrize("make", [evcl.VCL, evcl.EVCL])
def test_it_is_the_prior_of_the_first_task(make):
    learner = make(network(), prior=prior(shift=0.1), epochs=2)
    first = learner.state.run.memory.prior
    count = 12 * 65
    torch.testing.assert_close(first.mean[0, :768].view(12, 64), network()[0].weight.detach() + 0.1)
    torch.testing.assert_close(first.log_std[0].exp(), torch.full((count,), 0.2))
    learner.learn(TASKS[0])
    assert not torch.equal(flat(learner), flat(learned(make, "network")))


def learned(make, given, **settings):
    learner = make(network(), prior=given, epochs=2, **settings)
    learner.learn(TASKS[0])
    return learner


def test_a_narrow_prior_holds_the_weights():
    centre = torch.cat([p.detach().flatten() for p in network().parameters()])
    narrow, wide = (flat(learned(evcl.VCL, prior(std), tempering=1.0))[:, :780] - centre for std in (1e-3, 1.0))
    assert narrow.norm() < 0.1 * wide.norm()


def test_it_is_saved_and_learning_goes_on_as_if_uninterrupted(tmp_path):
    learner = learned(evcl.EVCL, prior())
    learner.save(tmp_path / "a.evcl")
    loaded = evcl.load(tmp_path / "a.evcl", network())
    loaded.save(tmp_path / "b.evcl")
    again = evcl.load(tmp_path / "b.evcl", network())
    for one in (learner, loaded, again):
        one.learn(TASKS[1])
    assert same(learner, loaded, again)
    empty = evcl.VCL(network(), prior=prior(std=0.3), epochs=2)
    empty.save(tmp_path / "c.evcl")
    fresh = evcl.load(tmp_path / "c.evcl", network())
    for one in (empty, fresh):
        one.learn(TASKS[0])
    assert same(fresh, empty)


def test_the_user_s_tensors_are_copied():
    given = prior()
    learner = evcl.VCL(network(), prior=given, epochs=1)
    given.means["0.weight"].zero_()
    assert float(learner.state.run.memory.prior.mean[:, :768].abs().max()) > 0


@pytest.mark.parametrize(
    ("given", "method", "message"),
    [
        (Prior({}, {}), "vcl", "the prior has no mean for '0.weight'"),
        (Prior(prior().means, {}), "vcl", "the prior has no standard deviation for '0.weight'"),
        (Prior({**prior().means, "0.weight": torch.ones(2)}, prior().stds), "vcl", "is (2,), but the weight is"),
        (prior(std=0.0), "vcl", "standard deviations finite and above 0"),
        (prior(), "ewc", "ewc has point weights, and takes no prior of your own"),
        ("mine", "vcl", "prior must be 'zero', 'network' or an evcl.nn.Prior"),
    ],
)
def test_a_bad_prior_is_one_clear_line(given, method, message):
    with refused(message):
        evcl.Learner(network(), method, prior=given)
