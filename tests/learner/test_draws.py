"""The posterior in the open: draws of predictions, and densities of weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import evcl

X = np.random.default_rng(0).normal(size=(40, 3))
Y = (X[:, 0] > 0).astype(int)


def learned(y=Y, network=None, **given):
    learner = evcl.EVCL(network or evcl.nn.mlp(3, [6]), epochs=3, **given)
    learner.learn(X, y)
    return learner


def test_draws_of_classes_are_joint_and_a_function_of_the_seed():
    learner = learned(predict_samples=5)
    found, before = learner.predictions(X, draws=5), learner.predict_proba(X)
    assert found.draws.shape == (5, 40, 2)
    np.testing.assert_allclose(found.draws.mean(0), before, atol=1e-6)
    np.testing.assert_array_equal(learner.predictions(X, draws=9).draws[:5], found.draws)
    np.testing.assert_allclose(
        learner.predictions(X[7:9], draws=5).draws, found.draws[:, 7:9], atol=1e-6
    )  # one draw for all rows
    np.testing.assert_array_equal(learner.predict_proba(X), before)
    assert learner.predictions(X).draws is None
    assert isinstance(learner.predictions(torch.as_tensor(X), draws=2).draws, torch.Tensor)


def test_draws_are_those_of_a_task():
    learner = learned(one_softmax=True)
    learner.learn(X, 1 - Y)
    assert (learner.predictions(X, 0, draws=4).draws.argmax(2) == Y).mean() > 0.5
    with pytest.raises(evcl.EvclError, match="choose a task"):
        learner.predictions(X, "infer", draws=4)


@pytest.mark.parametrize(
    ("kind", "y", "shape"),
    [
        ("gaussian", 100 + X[:, 0], (40,)),
        ("gaussian", 100 + X[:, :2], (40, 2)),
        ("poisson", np.round(np.exp(X[:, 0])), (40,)),
        ("bernoulli", X[:, :2] > 0, (40, 2)),
    ],
)
def test_draws_of_values_average_to_what_is_predicted(kind, y, shape):
    learner = learned(y, likelihood=kind, predict_samples=6)
    found = learner.predictions(X, draws=6)
    assert found.draws.shape == (6, *shape)
    wanted = found.probabilities if kind == "bernoulli" else found.mean
    np.testing.assert_allclose(found.draws.mean(0), wanted, rtol=1e-4, atol=1e-5)


def test_the_outputs_of_a_network_with_an_energy_of_ones_own_are_drawn():
    energy = evcl.targets.Energy(lambda out, y: 0.5 * ((y - out[:, 0]) ** 2 * (-out[:, 1]).exp() + out[:, 1]))
    with torch.random.fork_rng():
        network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    learner = learned(X[:, 0], network, likelihood=energy)
    found = learner.predictions(X, draws=7)
    assert found.draws.shape == (7, 40, 2)
    np.testing.assert_allclose(found.mean, found.draws.mean(0), atol=1e-6)
    assert (found.std > 0).all()
    with pytest.raises(evcl.EvclError, match=r"predictions\(x, draws=32\)"):
        learner.predictions(X)


def test_point_weights_have_no_draws():
    learner = evcl.EWC(evcl.nn.mlp(3, [6]), epochs=1)
    learner.learn(X, Y)
    with pytest.raises(evcl.EvclError, match="no draws"):
        learner.predictions(X, draws=3)


def test_the_density_of_weights():
    posterior = learned(posterior="diagonal").posterior
    weights = posterior.draw(3, seed=1)
    each = [torch.distributions.Normal(one.mean, one.std).log_prob(weights[name]) for name, one in posterior.items()]
    wanted = sum(one.flatten(1).sum(1) for one in each)
    torch.testing.assert_close(posterior.log_density(weights), wanted)
    assert posterior.log_density({name: one.mean for name, one in posterior.items()}) > wanted.max()
    assert all(torch.equal(one, posterior.draw(3, seed=1)[name]) for name, one in weights.items())
