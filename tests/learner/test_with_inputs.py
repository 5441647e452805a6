"""A network that gets more inputs: nothing changes for rows in which they are 0, and the new ones are learned."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import evcl
from evcl import EvclError, methods
from evcl._core.density import density
from evcl.nn import Layout


def rows(n=200, seed=0, columns=4):
    source = np.random.default_rng(seed)
    x = source.normal(size=(n, columns)).astype(np.float32)
    return x, (x[:, 0] + 0.5 * x[:, 1] > 0).astype(int)


def wide(x, count):
    return np.pad(x, ((0, 0), (0, count)))


def learned(method, **settings):
    learner = evcl.Learner(evcl.nn.mlp(4, [16]), method, seed=1, epochs=5, lr=0.02, **settings)
    learner.learn(rows(), task="january")
    learner.learn(rows(seed=1), task="february", head="january")
    return learner


@pytest.mark.parametrize(
    ("method", "settings"),
    [("evcl", {}), ("evcl", {"memory": 20}), ("ewc", {}), ("naive", {}), ("vcl", {"coreset": "random"})],
)
def test_predictions_stay_for_rows_in_which_the_new_inputs_are_0(method, settings):
    learner = learned(method, **settings)
    wider = learner.with_inputs(3)
    x = rows(seed=2)[0]
    before, after = learner.predictions(x, "february"), wider.predictions(wide(x, 3), "february")
    mean, wider_mean = learner.mean_network(0), wider.mean_network(0)
    with torch.no_grad():
        assert wider_mean(torch.tensor(wide(x, 3))).allclose(mean(torch.tensor(x)), atol=1e-6)
    # other draws of the weights, of the same distribution
    assert np.abs(np.asarray(after.probabilities) - np.asarray(before.probabilities)).max() < 0.06
    if before.unfamiliar is not None:
        assert np.median(np.asarray(after.unfamiliar)) == pytest.approx(
            np.median(np.asarray(before.unfamiliar)), rel=0.1
        )
    assert wider.evaluate_kept().keys() == learner.evaluate_kept().keys()
    assert learner.predict(x).shape == (200,)  # the learner itself is unchanged


@pytest.mark.parametrize("method", ["evcl", "ewc", "vcl", "naive"])
def test_what_comes_in_a_new_input_is_learned(method, tmp_path):
    wider = learned(method).with_inputs(2)
    x, _ = rows(400, seed=3)
    source = np.random.default_rng(4)
    flag = source.integers(0, 2, 400)
    y = (x[:, 0] + 0.5 * x[:, 1] + 4 * flag > 2).astype(int)
    x = np.column_stack([x, flag, np.zeros(400)]).astype(np.float32)
    wider.learn((x, y), task="march", head="january", epochs=30)
    found, without = (np.asarray(wider.predict(one)) for one in (x, x * np.float32([1, 1, 1, 1, 0, 1])))
    assert (found == y).mean() > 0.8
    assert (found == y).mean() > (without == y).mean() + 0.1
    wider.save(tmp_path / "m")
    again = evcl.load(tmp_path / "m")
    assert (again.predict_proba(x) == wider.predict_proba(x)).all()


def test_the_likelihood_of_classes_stays_and_sees_new_inputs():
    """Classes that come alone are told apart by random features; inputs that are added do not change them."""
    learner = evcl.EVCL(evcl.nn.mlp(4, [16]), seed=0, epochs=10)
    x, y = rows(300)
    learner.learn((x, y), task="a")
    learner.learn((x + 4, y + 2), task="b", head="a")
    wider = learner.with_inputs(1)
    there = wide(np.concatenate([x, x + 4]), 1)
    assert (np.asarray(wider.predict(there)) == np.asarray(learner.predict(np.concatenate([x, x + 4])))).mean() > 0.98
    wider.learn((np.column_stack([x, np.full(300, 5.0)]).astype(np.float32), y + 4), task="c", head="a")
    found = np.asarray(
        wider.predict(np.concatenate([there, np.column_stack([x, np.full(300, 5.0)])]).astype(np.float32))
    )
    assert (found == np.concatenate([y, y + 2, y + 4])).mean() > 0.9


def test_a_layout_that_grows_along_any_axis():
    old, new = Layout({"w": (2, 3), "b": (2,)}), Layout({"w": (2, 5), "b": (4,), "h": (1,)})
    flat, start = torch.arange(8.0).view(1, 8), 100 + torch.arange(float(new.size)).view(1, -1)
    found = old.extending(new)(flat, start)
    wanted = start.clone()
    new.view(wanted, "w")[:, :, :3] = old.view(flat, "w")
    new.view(wanted, "b")[:, :2] = old.view(flat, "b")
    assert (found == wanted).all()


def test_a_density_with_more_columns_is_that_of_rows_with_zeros():
    x, doubt = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)), torch.full((50,), 0.1)
    wider, wanted = density(x, doubt, 5).with_inputs(2), density(torch.nn.functional.pad(x, (0, 2)), doubt, 5)
    far = torch.randn(9, 5, generator=torch.Generator().manual_seed(1))
    assert wider.unfamiliar(far, doubt[:9]).allclose(wanted.unfamiliar(far, doubt[:9]), rtol=1e-4)
    assert wider.low.equal(wanted.low)
    assert wider.high.equal(wanted.high)


@pytest.mark.parametrize("method", ["xdg", "progressive", "progress-compress"])
def test_methods_that_cannot_say_so(method):
    learner = evcl.Learner(evcl.nn.mlp(4, [8]), method, epochs=1)
    learner.learn(rows(), task="a")
    with pytest.raises(EvclError, match=f"{methods.get(method).name} cannot have more inputs: "):
        learner.with_inputs(1)
