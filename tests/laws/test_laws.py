"""The laws' programs: what they compare with is right, by a second way, and VCL reaches it; what they print."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

ALONE = {"distill": 0, "tempering": 1}


def program(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "laws"))
        return importlib.import_module(name)


exact, calibration, stationary = program("exact"), program("calibration"), program("stationary")


@pytest.fixture(autouse=True)
def _threads_and_the_global_generator_stay_as_they_were():
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


def printed(monkeypatch, capsys, name, *words):
    monkeypatch.setattr(sys, "argv", [name, *words])
    program(name).main()
    return capsys.readouterr().out


def gradient(x, y, log_likelihood, belief, prior):
    """Of the ELBO of independent weights, at `belief`: by autograd, and a fine grid over each row's output."""
    x, y, *start = (torch.as_tensor(one, dtype=torch.float64) for one in (x, y, *belief))
    mean, std = (one.clone().requires_grad_() for one in start)
    z = torch.linspace(-9, 9, 4001, dtype=torch.float64)
    density = torch.exp(-0.5 * z.square()) / torch.exp(-0.5 * z.square()).sum()
    a = (x @ mean).unsqueeze(1) + (x.square() @ std.square()).sqrt().unsqueeze(1) * z
    q, p = (torch.distributions.Normal(*(torch.as_tensor(one) for one in pair)) for pair in ((mean, std), prior))
    elbo = (log_likelihood(a, y.unsqueeze(1)) @ density).sum() - torch.distributions.kl_divergence(q, p).sum()
    return torch.cat(torch.autograd.grad(elbo, (mean, std))).abs().max()


@pytest.fixture
def rows():
    source = np.random.default_rng(5)
    x = np.column_stack([exact.correlated(source, 40, 3), np.ones(40)])
    prior = exact.Belief(source.standard_normal(4), np.array([1.0, 0.5, 2.0, 1.0]))
    return x, (source.random(40) < 0.4).astype("int64"), x @ source.standard_normal(4), prior


def test_the_mean_field_optima_are_where_the_gradient_of_the_elbo_is_zero(rows):
    x, labels, numbers, prior = rows
    logistic = exact.logistic_mean_field(x, labels, prior)
    assert gradient(x, labels, lambda a, y: y * a - F.softplus(a), logistic, prior) < 1e-6
    linear = exact.linear_mean_field(x, numbers, 0.5, prior)
    assert gradient(x, numbers, lambda a, y: -0.5 * ((y - a) / 0.5).square(), linear, prior) < 1e-6


def test_the_quadrature_over_all_weights_equals_a_sum_over_a_fine_grid(rows):
    x, y = rows[0][:, 2:], rows[1]
    found = exact.logistic_exact(x, y, 2.0)
    grid = np.stack(np.meshgrid(*[np.linspace(-5, 5, 601)] * 2, indexing="ij"), -1).reshape(-1, 2)
    a = grid @ x.T
    log_p = (y * a - np.logaddexp(0, a)).sum(1) - 0.125 * (grid**2).sum(1)
    share = np.exp(log_p - log_p.max())
    share /= share.sum()
    mean = share @ grid
    np.testing.assert_allclose(found.mean, mean, atol=1e-5)
    np.testing.assert_allclose(found.std, np.sqrt(share @ (grid - mean) ** 2), rtol=1e-5)


def test_the_exact_posterior_is_that_of_conditioning_on_the_targets(rows):
    x, _, y, prior = rows
    mean, covariance = exact.linear_exact(x, y, 0.5, prior)
    before = np.diag(prior.std**2)
    gain = before @ x.T @ np.linalg.inv(x @ before @ x.T + 0.25 * np.eye(len(x)))
    np.testing.assert_allclose(mean, prior.mean + gain @ (y - x @ prior.mean), rtol=1e-8)
    np.testing.assert_allclose(covariance, before - gain @ x @ before, atol=1e-10)


def test_learned_noise_is_near_the_noise_that_there_was():
    source, prior = np.random.default_rng(0), exact.Belief(np.zeros(3), np.ones(3))
    x = [exact.correlated(source, 2000, 3) for _ in range(2)]
    parts = [(one, one @ [1.0, -1.0, 0.5] + 0.3 * source.standard_normal(2000)) for one in x]
    mean, covariance = exact.linear_exact(np.concatenate(x), np.concatenate([y for _, y in parts]), 0.3, prior)
    found, narrow = (exact.learned_noise(parts, prior, exact=one) for one in (True, False))
    np.testing.assert_allclose(found.mean, mean, atol=1e-4)
    np.testing.assert_allclose(found.std, np.sqrt(np.diag(covariance)), rtol=0.03)
    assert (narrow.std < found.std).all()


@pytest.mark.parametrize(
    ("stream", "seed"),
    [("known noise", 0), ("labels", 0), ("classes", 0)]
    + [pytest.param(name, seed, marks=pytest.mark.full) for name in exact.STREAMS for seed in (1, 2, 3)],
)
def test_vcl_reaches_the_mean_field_optimum(stream, seed):
    found = exact.compare(exact.STREAMS[stream](seed), "vcl", seed, **ALONE, **exact.CONVERGED)
    for name, (_, _, distance, ratio) in found.items():  # the law is 0.1: the noise of numbers, learned too, misses it
        assert distance <= {"numbers": 0.3, "contrasts": 0.12}.get(name, 0.1), name
        assert ratio == pytest.approx(1, abs=0.08 if name == "numbers" else 0.03), name


def test_weights_drawn_from_the_prior_are_as_far_from_the_mean_as_vcl_says():
    z = np.concatenate([calibration.z_scores("vcl", seed, **ALONE, **exact.CONVERGED) for seed in range(4)])
    assert len(z) == 4 * calibration.WEIGHTS
    assert 0.7 < z.std() < 1.3


def test_noisy_labels_have_the_accuracy_that_is_asked_for():
    for accuracy in (0.7, 0.8, 0.94):
        data = stationary.noisy_labels(accuracy)(0)
        assert (data.best < np.log(2)).mean() == pytest.approx(accuracy, abs=0.03)  # the likelier label came


def test_a_program_prints_its_table_and_writes_every_figure(monkeypatch, capsys, tmp_path):
    out = tmp_path / "figures" / "exact.json"
    words = ["--methods", "vcl", "ewc", "--streams", "classes", "--seeds", "2", "--set", "epochs=2", "tempering=1"]
    lines = printed(monkeypatch, capsys, "exact", *words, "--out", str(out)).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[:2] for row in cells] == [
        [of, method] for of in ("classes", "contrasts") for method in ("mean-field", "vcl", "ewc")
    ]
    assert [row[3] for row in cells if row[1] == "ewc"] == ["-", "-"]  # point weights have no standard deviations
    kept = json.loads(out.read_text("utf-8"))
    assert kept["options"]["set"] == ["epochs=2", "tempering=1"]
    distances = np.array(kept["figures"]["contrasts"]["vcl"])[:, 0]
    assert f"{distances.mean():.3f} ± {distances.std(ddof=1):.3f}" == cells[4][2]


def test_a_setting_that_no_method_has_is_refused(monkeypatch, capsys):
    for words in (["--set", "one_softmax=true"], ["--set", "strngth=1"], ["--set", "epochs"]):
        with pytest.raises(SystemExit):
            printed(monkeypatch, capsys, "exact", "--methods", "vcl", *words)
        assert "is not NAME=VALUE for a setting of vcl" in capsys.readouterr().err


def test_one_task_counts_the_data_sets_on_which_a_method_is_not_behind(monkeypatch, capsys):
    words = ["--quick", "--epochs", "1", "--case", "iris", "--case", "noisy table", "--methods", "vcl", "evcl"]
    lines = printed(monkeypatch, capsys, "one_task", *words, "--set", "distill=0").splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["iris", "iris", "noisy", "noisy", "in", "in"]
    assert " of 2, not behind on " in lines[-1]
