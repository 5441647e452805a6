"""A learner of numbers, counts and several labels: noise, intervals, scales, files, refusals."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import refused
from safetensors.torch import save_file
from scipy import stats

import evcl
from evcl.targets.negative_binomial import count_interval, count_nll
from evcl.targets.scale import far_outside, limited
from evcl.training.targets import rescale


def rows(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3)).astype("float32")
    return x, 100 + 20 * x[:, 0] - 10 * np.abs(x[:, 1]) + 5 * rng.normal(size=n)


def learned(**options: Any) -> evcl.Learner:
    return copy.deepcopy(_learned(**options))


@cache
def _learned(**options: Any) -> evcl.Learner:
    learner = evcl.Learner(evcl.nn.mlp(3, [20]), likelihood="gaussian", seed=0, **options)
    learner.learn(rows(400), "a", epochs=20)
    return learner


def test_numbers_are_learned_with_their_noise() -> None:
    learner = learned()
    x, y = rows(2000, seed=1)
    found = learner.measure((x, y))
    assert found.rmse < 7  # the noise is 5, the deviation of y is 22
    assert 0.92 <= found.coverage <= 0.98
    p = learner.predictions(x)
    assert 4 < p.aleatoric[0] < 7
    np.testing.assert_allclose(p.std**2, p.aleatoric**2 + p.epistemic**2)
    np.testing.assert_allclose(learner.predict(x), p.mean)
    low, high = p.interval(0.5)
    assert 0.42 < ((low < y) & (y < high)).mean() < 0.58
    far = learner.predictions(10 * x[:50])
    assert far.epistemic.mean() > 2 * p.epistemic.mean()


def test_a_task_on_another_scale_does_not_distort_what_was_learned() -> None:
    """The head is expressed on the new scale exactly: after a task of 0 effect, predictions are the same."""
    learner = learned()
    x, _ = rows(50, seed=2)
    before = learner.predictions(x)
    session, run = learner.state.session, learner.state.run
    old = session.scales["a"]
    new = old._replace(mean=old.mean + 1234.5, std=old.std * 77)
    rescale(run, 0, old, new)
    session.scales = {"a": new}
    after = learner.predictions(x)
    np.testing.assert_allclose(after.mean, before.mean, rtol=1e-4)
    np.testing.assert_allclose(after.epistemic, before.epistemic, rtol=1e-2)
    torch.testing.assert_close(run.memory.prior.mean, run.network.posterior.mean)


def test_later_tasks_may_have_another_mean_and_scale() -> None:
    learner = learned()
    x, y = rows(400, seed=3)
    learner.learn((x, 1000 * y - 5e4), "b", head="a", epochs=20)
    found = learner.measure((x, 1000 * y - 5e4))
    assert found.rmse < 0.7 * 1000 * y.std()
    assert np.isfinite(found.nll)


def test_intervals_follow_targets_that_drift() -> None:
    learner, inside = learned(), []
    for k in range(1, 6):
        x, y = rows(200, seed=10 + k)
        y = y + 30 * k * x[:, 2]
        if k > 1:
            low, high = learner.predictions(x).interval()
            inside.append(((low <= y) & (y <= high)).mean())
        learner.learn((x, y), str(k), head="a", epochs=20)
    assert np.mean(inside) > 0.9


def test_the_noise_is_carried_by_bayes_rule() -> None:
    learner = learned()
    head = learner.state.run.network.number_head(0)
    noise, count = head.earlier[0, 0].item(), head.earlier[0, 1].item()
    assert count == 400
    assert noise == pytest.approx(float(head.beside.exp()))
    before = head.beside.clone()
    head.follow(torch.full((1, 1), 4 * noise), 400, 1.0)
    assert float(head.beside.exp()) == pytest.approx((400 * noise + 400 * 4 * noise) / 800)
    head.beside.copy_(before)


def test_a_failed_task_leaves_everything_as_it_was() -> None:
    learner = learned()
    x, y = rows(50, seed=5)
    before, told = learner.predictions(x), learner.described()[0]

    class Stop(evcl.Callback):
        def end_epoch(self, epoch: evcl.Epoch) -> bool:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        learner.learn((x, 9 * y), "b", head="a", callbacks=[Stop()])
    assert learner.described()[0] == told
    np.testing.assert_array_equal(learner.predictions(x).mean, before.mean)
    np.testing.assert_array_equal(learner.predictions(x).std, before.std)


@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli", "poisson"])
@pytest.mark.parametrize("method", ["evcl", "vcl-random-coreset", "ewc"])
def test_a_saved_learner_predicts_and_learns_on_alike(likelihood: str, method: str, tmp_path: Path) -> None:
    x, y = rows(120)
    targets = {
        "gaussian": np.stack([y, -y], 1),
        "bernoulli": np.stack([y > 100, y > 120, y > 80], 1),
        "poisson": np.maximum(0, (y / 20).round()),
    }[likelihood]
    learner: Any = evcl.Learner(evcl.nn.mlp(3, [8]), method, likelihood=likelihood, epochs=2)
    learner.learn((x[:60], targets[:60]), "a")
    learner.learn((x[60:], targets[60:]), "b", head="a")
    learner.save(tmp_path / "m.safetensors")
    other = evcl.load(tmp_path / "m.safetensors")
    for one, two in zip(learner.predictions(x, "a"), other.predictions(x, "a"), strict=True):
        np.testing.assert_array_equal(one, two)
    for each in (learner, other):
        each.learn((x[:60], targets[:60]), "c", head="a")
    np.testing.assert_array_equal(learner.predict(x, "a"), other.predict(x, "a"))
    assert learner.measure((x, targets), "a") == other.measure((x, targets), "a")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("likelihood", "cauchy"),
        ("scales", {}),
        *(
            ("scales", {"a": {"rows": 1, "mean": mean, "std": std, "errors": [0], "tested": 1, "tasks": 0}})
            for mean, std in (([0], [0]), (["x"], [1]), ([0, 0], [1]))
        ),
    ],
)
def test_damage_is_refused_in_one_line(field: str, value: Any, tmp_path: Path) -> None:
    path, (about, tensors) = tmp_path / "m.safetensors", learned().described()
    save_file(tensors, path, {"evcl": json.dumps({**about, field: value})})
    with refused(f"cannot load {path}: "):
        evcl.load(path)


def test_validation_stops_early_and_is_recorded() -> None:
    learner = evcl.Learner(evcl.nn.mlp(3, [20]), likelihood="gaussian")
    learner.learn(rows(300), "a", epochs=30, validation=0.2, patience=2)
    told = learner.card()["tasks"][0]["validation"]
    assert told["examples"] == 60
    assert told.keys() == {"examples", "rmse", "nll", "coverage"}


def test_weights_of_examples_count_as_repetitions() -> None:
    """Rows of weight 0 are left out, and a heavy half decides what is predicted."""
    x = np.zeros((200, 2), dtype="float32")
    x[:, 0] = np.linspace(-1, 1, 200)
    y = np.where(np.arange(200) % 2, 10.0, -10.0)
    learner = evcl.Learner(evcl.nn.mlp(2, [8]), likelihood="gaussian", epochs=10)
    learner.learn((x, y), sample_weight=np.where(y > 0, 9.0, 1.0))
    assert learner.predict(x).mean() == pytest.approx(8.0, abs=1.5)


def test_weights_count_in_the_noise_and_in_the_usual_count() -> None:
    """Rows of a tiny weight hardly count: neither in the intervals, nor in what a second task is taken for."""
    x, y = rows(300)
    wild = np.arange(300) % 2 == 0
    y[wild] += 200 * np.random.default_rng(1).normal(size=wild.sum())
    weights = np.where(wild, 1e-6, 1.0)
    learner = evcl.Learner(evcl.nn.mlp(3, [20]), likelihood="gaussian", epochs=20)
    learner.learn((x, y), "a", sample_weight=weights)
    assert learner.predictions(x).aleatoric[0] < 15  # all rows alike: about 140
    learner.learn((x, y), "b", head="a", sample_weight=weights)
    assert learner.predictions(x).aleatoric[0] < 15
    counts = np.where(wild, 10_000, 3)
    learner = evcl.Learner(evcl.nn.mlp(3, [20]), likelihood="poisson", epochs=20)
    learner.learn((x, counts), sample_weight=np.where(wild, 1e-9, 1.0))
    assert learner.predict(x).mean() == pytest.approx(3, rel=0.2)


@pytest.mark.parametrize("name", ["gaussian", "poisson", "bernoulli"])
def test_surprise_counts_weights_as_repetitions(name: str) -> None:
    rng = torch.Generator().manual_seed(0)
    likelihood: Any = evcl.targets.get(name)
    outputs = torch.randn(2, 6, 2 if name == "bernoulli" else 4, generator=rng)
    y = torch.randint(0, 2, (2, 6, 2), generator=rng).float()
    twice = [0, 1, 1, 2, 3, 4, 5, 5]
    weights = torch.tensor([[1.0, 2, 1, 1, 1, 2]]).expand(2, 6)
    repeated = likelihood.surprise(outputs[:, twice], y[:, twice], None)
    torch.testing.assert_close(likelihood.surprise(outputs, y, weights), repeated)
    torch.testing.assert_close(likelihood.surprise(outputs, y, 0.3 * weights), repeated)


@pytest.mark.full
def test_inputs_of_another_region_are_not_taken_for_a_contradiction() -> None:
    """y = sin 2x + u / 2 holds in both tasks; only x moves. What was learned of the first region mostly stays."""

    def region(centre: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(seed)
        x = np.stack([centre + 0.4 * rng.normal(size=510), rng.normal(size=510)], 1).astype("float32")
        return x, np.sin(2 * x[:, 0]) + x[:, 1] / 2 + 0.1 * rng.normal(size=510)

    kept = {}
    for method in ("evcl", "naive"):
        learner = evcl.Learner(evcl.nn.mlp(2, [50]), method, likelihood="gaussian", epochs=60)
        learner.learn(region(-1.5, 0), "a")
        learner.learn(region(1.5, 1), "b", head="a")
        kept[method] = learner.measure(region(-1.5, 2)).rmse
        assert learner.measure(region(1.5, 3)).rmse < 0.2
    assert kept["evcl"] < 0.5 * kept["naive"]


@pytest.mark.parametrize("name", ["gaussian", "poisson", "bernoulli"])
def test_predictions_are_known_where_draws_agree(name: str) -> None:
    likelihood: Any = evcl.targets.get(name)
    rng = torch.Generator().manual_seed(0)
    base = torch.zeros(1, 4, 1 if name == "bernoulli" else 2)
    for spread, low, high in ((1e-3, 0.999, 1.0), (20.0, 0.0, 0.2)):
        shift = spread * torch.randn(200, *base.shape, generator=rng)
        if name != "bernoulli":
            shift[..., 1] = 0
        averaged = likelihood.predict(base + shift).mean(0)
        assert low <= float(likelihood.known(averaged, 200, None)) <= high


def test_a_mistyped_target_does_not_ruin_a_model() -> None:
    learner = learned()
    x, y = rows(200, seed=4)
    y[17] = 1e6
    with pytest.warns(UserWarning, match=r"targets far outside the others .*: 1, the first in row 17, 1e\+06"):
        learner.learn((x, y), "b", head="a", epochs=20)
    found = learner.measure(rows(1000, seed=6))
    assert found.rmse < 7  # the noise is 5
    assert 0.9 <= found.coverage <= 0.99
    assert float(learner.state.session.scales["a"].std) < 30


def test_ordinary_targets_are_never_far_outside() -> None:
    rng = np.random.default_rng(0)
    drawn = {
        "normal": rng.normal(size=20_000),
        "skewed": rng.lognormal(size=20_000),
        "two groups": np.where(rng.random(20_000) < 0.5, 0.0, 1e6) + rng.normal(size=20_000),
        "mostly 0": np.where(rng.random(20_000) < 0.995, 0.0, 100.0),
        "constant": np.full(50, 3.0),
        "few": np.array([1.0, 2.0, 1e9]),
    }
    for name, y in drawn.items():
        given = torch.tensor(y).unsqueeze(1)
        assert not far_outside(given).any(), name
        assert torch.equal(limited(given), given)


def test_several_labels_at_once() -> None:
    x, _ = rows(400)
    labels = np.stack([x[:, 0] > 0, x[:, 1] > 0], 1)
    learner = evcl.Learner(evcl.nn.mlp(3, [20]), likelihood="bernoulli", epochs=20)
    learner.learn((x, labels))
    p = learner.predictions(x)
    assert p.labels.shape == p.probabilities.shape == (400, 2)
    assert (p.labels == labels).mean() > 0.95
    np.testing.assert_allclose(p.entropy, p.aleatoric + p.epistemic, atol=1e-6)
    np.testing.assert_array_equal(learner.predict_proba(x), p.probabilities)
    assert learner.measure((x, labels)).accuracy == pytest.approx((p.labels == labels).mean())


def test_counts_of_any_size() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 2)).astype("float32")
    for usual in (0.3, 3000.0):
        y = rng.poisson(usual * np.exp(0.3 * x[:, 0]))
        learner = evcl.Learner(evcl.nn.mlp(2, [20]), likelihood="poisson", epochs=20)
        learner.learn((x, y))
        found = learner.predictions(x)
        assert found.mean.mean() == pytest.approx(y.mean(), rel=0.2)
        low, high = found.interval(0.9)
        assert ((low <= y) & (y <= high)).mean() > 0.87
        assert (low >= 0).all()


@pytest.mark.parametrize("excess", [0.0, 0.3, 4.0])  # of the variance over the mean
def test_counts_are_those_of_the_negative_binomial_for_every_mean(excess: float) -> None:
    mean = np.array([1.0, 4, 10, 100, 500, 744, 746, 800, 900, 999, 1001, 2000])
    variance = (1 + excess) * mean
    low, high = count_interval(mean, np.sqrt(variance), 0.95)
    exact = stats.poisson(mean) if not excess else stats.nbinom(mean**2 / (variance - mean), 1 / (1 + excess))
    for found, q in ((low, 0.025), (high, 0.975)):
        np.testing.assert_allclose(found, exact.ppf(q), rtol=0.01, atol=1)
    for y in (0, 3, 700):
        nll = count_nll(mean, np.sqrt(variance), np.full(12, float(y)))
        np.testing.assert_allclose(nll, -exact.logpmf(y), rtol=0.01)


def test_targets_in_small_units_are_learned_alike() -> None:
    """Only targets that are all equal count as constant, whatever their unit."""
    x, y = rows(200)
    found = []
    for unit in (1.0, 1e-12):
        learner = evcl.Learner(evcl.nn.mlp(3, [20]), likelihood="gaussian", epochs=5)
        learner.learn((x, unit * (y - 100)))
        found.append(learner.measure((x, unit * (y - 100))).rmse / unit)
    assert found[1] == pytest.approx(found[0], rel=1e-3)
    learner = evcl.Learner(evcl.nn.mlp(3, [20]), likelihood="gaussian", epochs=2)
    learner.learn((x, np.full(200, 3.7e-12)))
    assert np.isfinite(learner.predict(x)).all()


@pytest.mark.parametrize(
    ("options", "y", "message"),
    [
        ({"likelihood": "cauchy"}, None, "likelihood must be one of categorical, gaussian"),
        ({"likelihood": "gaussian", "method": "lwf"}, None, "lwf learns classes only: it distils"),
        ({"likelihood": "gaussian", "method": "er"}, None, "er learns classes only: its memory"),
        ({"likelihood": "gaussian", "memory": 20}, None, "a memory keeps rows by class: leave memory out"),
        ({"likelihood": "gaussian"}, [1.0, np.nan], "must be numbers, but row 1 has nan"),
        ({"likelihood": "gaussian"}, ["a", "b"], "must be numbers, not"),
        ({"likelihood": "bernoulli"}, [[0, 1], [1, 2]], "must be 0 or 1, but row 1 has 2"),
        ({"likelihood": "poisson"}, [1.5, 2], "whole numbers of at least 0, but row 0 has 1.5"),
        ({"likelihood": "gaussian"}, [1.0, 2.0, 3.0], "there are 2 inputs but 3 targets"),
    ],
)
def test_what_cannot_be_learned_is_refused_in_one_line(options: dict[str, Any], y: Any, message: str) -> None:
    with refused(message):
        evcl.Learner(evcl.nn.mlp(2, [4]), **options).learn((np.eye(2, dtype="float32"), y))


def test_options_for_classes_are_refused() -> None:
    learner = learned()
    x, y = rows(20)
    for options in ({"classes": [1, 2]}, {"class_weight": "balanced"}, {"reread": True}):
        with pytest.raises(evcl.EvclError, match=f"{next(iter(options))} is for targets that are classes"):
            learner.learn((x, y), "b", head="a", **options)
    with pytest.raises(evcl.EvclError, match="1 targets per example, but this task has 2"):
        learner.learn((x, np.stack([y, y], 1)), "b", head="a")
    with pytest.raises(evcl.EvclError, match="no class probabilities"):
        learner.predict_proba(x)
    with pytest.raises(evcl.EvclError, match="class probabilities only"):
        learner.predictions(x, "infer")


def test_the_mean_network_predicts_in_the_units_of_the_targets() -> None:
    learner = learned()
    x, _ = rows(50, seed=7)
    plain = learner.mean_network()(torch.from_numpy(x)).detach().numpy()[:, 0]
    np.testing.assert_allclose(plain, learner.predict(x), atol=3.0)
    with pytest.raises(evcl.EvclError, match="only learners of classes can be exported"):
        learner.export("m.pt2")
