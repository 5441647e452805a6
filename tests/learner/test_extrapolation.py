"""Beyond the range of the training rows, intervals of numbers and counts grow with the distance."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import evcl
from evcl._core.density import Density, density


@cache
def wave() -> evcl.Learner:
    """sin(2 x), learned on [-2, 2]."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (300, 1)).astype("float32")
    learner = evcl.EVCL(evcl.nn.mlp(1, [50]), likelihood="gaussian", seed=0, epochs=60)
    learner.learn((x, np.sin(2 * x[:, 0]) + 0.1 * rng.normal(size=300)), "a")
    return learner


@cache
def table(likelihood: str, columns: int = 10) -> tuple[evcl.Learner, np.ndarray, np.ndarray]:
    """A linear rule in some columns, and rows that were held out. Counts fall along the first column."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(1300, columns)).astype("float32")
    rule = x @ (2 * np.cos(np.arange(columns)))
    y = rule + 2 * rng.normal(size=1300) if likelihood == "gaussian" else rng.poisson(5 * np.exp(-x[:, 0]))
    learner = evcl.EVCL(evcl.nn.mlp(columns, [20]), likelihood=likelihood, seed=0, epochs=30)
    learner.learn((x[:300], y[:300]), "a")
    return learner, x[300:], y[300:]


def test_intervals_contain_the_truth_and_the_targets_seen_far_away() -> None:
    far = np.array([[2.5], [3], [5], [-5], [20], [100]], dtype="float32")
    found = wave().predictions(far)
    low, high = found.interval()
    truth = np.sin(2 * far[:, 0])
    assert ((low < truth) & (truth < high)).all()
    assert (low[1:] < -1).all()
    assert (high[1:] > 1).all()
    assert (np.diff(found.std[[0, 1, 2, 4, 5]]) > 0).all()
    np.testing.assert_allclose(found.std**2, found.aleatoric**2 + found.epistemic**2)


def test_the_variance_is_that_of_its_formula() -> None:
    learner = wave()
    seen, scale = learner.state.session.density, learner.state.session.scales["a"]
    assert seen is not None
    far, edge = np.array([[5.0]], dtype="float32"), np.array([[float(seen.high[0])]], dtype="float32")
    before = learner.predictions(far)
    e = (5 - float(seen.high[0])) / float(seen.variance[0]) ** 0.5
    change = float(before.mean[0] - learner.predictions(edge).mean[0])
    everywhere = torch.full_like(seen.mean, torch.inf)
    learner.state.session.density = replace(
        seen, low=-everywhere, high=everywhere
    )  # as of a file of an earlier release
    plain = learner.predictions(far)
    learner.state.session.density = seen
    assert before.mean == plain.mean
    assert before.aleatoric == plain.aleatoric
    wanted = plain.epistemic[0] ** 2 + change**2 + (e * float(scale.std[0])) ** 2
    np.testing.assert_allclose(before.epistemic[0] ** 2, wanted, rtol=1e-5)


def test_nothing_changes_within_the_range_and_little_near_it() -> None:
    learner, x, y = table("gaussian")
    seen = learner.state.session.density
    assert seen is not None
    inside = (seen.within(torch.from_numpy(x))[1] == 0).numpy()
    assert 0.8 < inside.mean() < 1
    now, coverage = learner.predictions(x), learner.measure((x, y)).coverage
    shifted = x.copy()
    shifted[:, 1] += 2  # deviations
    moved = learner.predictions(shifted)
    learner.state.session.density = None
    plain = learner.predictions(x)
    learner.state.session.density = seen
    assert (now.std[inside] == plain.std[inside]).all()
    assert (now.mean == plain.mean).all()
    assert (now.std[~inside] > plain.std[~inside]).all()
    assert 0.92 <= coverage <= 0.98
    assert now.std.mean() < 1.01 * plain.std.mean()
    assert plain.std.mean() < moved.std.mean() < 1.5 * plain.std.mean()


@pytest.mark.parametrize("far", [-20.0, 20.0])
def test_intervals_of_counts_grow_too(far: float) -> None:
    """Far up the column the rate falls to 0, and down the column it is enormous."""
    learner, *_ = table("poisson", 1)
    found = learner.predictions(np.array([[far]], dtype="float32"))
    low, high = found.interval()
    assert low[0] == 0
    assert high[0] > 10
    inside = learner.predictions(np.zeros((1, 1), dtype="float32"))
    assert found.epistemic[0] > 10 * inside.epistemic[0]


def test_a_model_of_an_earlier_release_knows_no_range_and_predicts_as_before() -> None:
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    tensors = density(x, torch.full((50,), 0.1), 3).tensors()
    old = Density.from_tensors({name: t for name, t in tensors.items() if name not in ("low", "high")})
    again = Density.from_tensors(old.tensors())
    for one in (old, again, again.merged(density(x, torch.full((50,), 0.1), 3), 3)):
        moved, far = one.within(100 * x)
        assert moved.equal(100 * x)
        assert not far.any()


def test_the_regressor_and_its_intervals_say_so_too() -> None:
    pytest.importorskip("sklearn")
    from evcl.sklearn import EVCLRegressor

    rng = np.random.default_rng(0)
    x = rng.uniform(0, 10, (200, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = EVCLRegressor(random_state=0).fit(x, 50 + 10 * np.sin(x[:, 0]))
    _, std = model.predict([[5], [15], [30]], return_std=True)
    low, high = model.predict_interval([[15], [30]]).T
    assert std[0] < 5
    assert 10 < std[1] < std[2]
    assert (low < 40).all()
    assert (high > 60).all()
