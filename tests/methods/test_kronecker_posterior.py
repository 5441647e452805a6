"""EVCL's posterior with a matrix for every layer: what it is, how exact it is, and that all of evcl draws from it."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checks import refused, same
from small_runs import F64, TASKS, first_fit, learned, logits, plain

import evcl

KRONECKER = {"posterior": "kronecker", "distill": 0.0, "tempering": 1.0}
BAYES = {**KRONECKER, "kronecker.temperature": 1.0, "kronecker.damping": 0.0}
X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] + X[:, 1] > 0).long()


def dense(gaussian):
    """The precision of replica 0."""
    size = gaussian.mean.shape[1]
    return torch.stack([gaussian.precision_times(row.unsqueeze(0))[0] for row in torch.eye(size, dtype=F64)])


def test_draws_and_marginals_are_those_of_the_dense_precision():
    q = learned("evcl", TASKS[:2], **KRONECKER).structured
    covariance = dense(q).inverse()
    torch.testing.assert_close(q.marginals().variance()[0], covariance.diagonal())
    size = q.mean.shape[1]
    zero = torch.zeros(1, size, dtype=F64)
    root = torch.stack([q.draw(zero + row)[0] - q.mean[0] for row in torch.eye(size, dtype=F64)])
    torch.testing.assert_close(root.mT @ root, covariance)  # of draws mu + root z, for any number of them
    z = torch.randn(20_000, size, generator=torch.Generator().manual_seed(0), dtype=F64)
    drawn = torch.cat([q.draw(one.unsqueeze(0)) for one in z[:50]])
    torch.testing.assert_close(drawn, q.mean + z[:50] @ root)
    scale = covariance.diagonal().sqrt()
    assert (
        (z @ root).mT.cov() / scale / scale.unsqueeze(1) - covariance / scale / scale.unsqueeze(1)
    ).abs().max() < 0.05


def test_a_draw_does_not_depend_on_the_order_of_equal_eigenvalues():
    """Those of a layer whose Fisher is 0 are all equal, and their eigenvectors are arbitrary."""
    run = learned("evcl", TASKS[:1], **KRONECKER)
    q = run.structured
    z = torch.randn(1, q.mean.shape[1], generator=torch.Generator().manual_seed(0), dtype=F64)
    before = q.draw(z)
    for key, root in q.roots.items():
        sign = torch.where(torch.arange(root.u.shape[2]) % 2 > 0, -1.0, 1.0)
        q.known[key] = root._replace(u=root.u * sign, left=root.left * sign)
    torch.testing.assert_close(q.draw(z), before)


def test_rows_count_once():
    """What pulls at the means is the first prior and the Fisher of the earlier rows, and this is measured exactly."""
    run = learned("evcl", TASKS[:1], **BAYES, prior_std=0.7, init_std=1e-6, std_update="adam", std_lr_scale=1e-9)
    network, (one,) = plain(run), TASKS[:1]
    fit = first_fit(run, [TASKS[2]])
    q = run.network.posterior
    q = type(q)(q.mean.clone().requires_grad_(), q.log_std, run.network.layout)
    n = TASKS[2].n
    hessian = torch.autograd.functional.hessian(
        lambda mean: n * sum(term.loss(type(q)(mean, q.log_std, q.layout)).sum() for term in fit.terms), q.mean
    )[0, :, 0]
    wanted = torch.zeros_like(hessian)
    span = run.network.layout.spans
    features = torch.relu(F.linear(one.x[0], network["1"].weight, network["1"].bias)).detach()
    known = torch.cat([features, torch.ones_like(features[:, :1])], 1)
    p = logits(network, one.x[0]).softmax(1).detach()
    a, g = known.mT @ known / len(known), (torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)).sum(0)
    at = [*range(*span["head 0.weight"].indices(len(wanted))), *range(*span["head 0.bias"].indices(len(wanted)))]
    order = [(o, i) for o in range(2) for i in range(features.shape[1])] + [(o, features.shape[1]) for o in range(2)]
    head = torch.stack([torch.stack([g[o, k] * a[i, j] for k, j in order]) for o, i in order])
    head = head + torch.eye(len(order), dtype=F64) / 0.7**2
    torch.testing.assert_close(hessian[at][:, at], head, rtol=1e-4, atol=1e-5)


def program(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "laws"))
        return importlib.import_module(name)


def test_a_linear_model_has_the_exact_posterior(monkeypatch):
    exact = program("exact")
    monkeypatch.setattr(exact, "LINEAR_PARTS", 3)
    with torch.random.fork_rng():
        ((distance, ratio, *_),) = exact.compare(
            exact.known_noise(0), "evcl", 0, **{**exact.CONVERGED, "epochs": 600, **BAYES}
        ).values()
    assert distance < 0.05
    assert 0.95 < ratio < 1.05


def test_a_logistic_regression_is_nearer_to_the_exact_posterior_than_independent_weights():
    exact = program("exact")
    stream = exact.classes(0)
    with torch.random.fork_rng():
        found = exact.compare(stream, "evcl", 0, **{**exact.CONVERGED, **BAYES})
    for one in stream.compared:
        mean_field = exact.figures(one.mean_field, one)
        assert found[one.name][0] < mean_field[0], one.name


def learner(make=lambda: evcl.nn.mlp(4, [8]), method="evcl", **given):
    return evcl.Learner(make(), method, **{"epochs": 4, **given})


def test_predictions_draw_from_the_matrix():
    one = learner(predict_samples=400)
    one.learn((X, Y), "a")
    weights = one.posterior.draw(400, seed=5)
    h = torch.relu(X @ weights["1.weight"].mT + weights["1.bias"].unsqueeze(1))
    p = (h @ weights["head 0.weight"].mT + weights["head 0.bias"].unsqueeze(1)).softmax(2)
    error = (p.var(0) / 400).sqrt().max()
    assert (one.predict_proba(X) - p.mean(0)).abs().max() < 6 * error
    each = one.posterior["1.weight"]
    flat = weights["1.weight"].flatten(1)
    torch.testing.assert_close(flat.std(0), each.std.flatten(), rtol=0.2, atol=0)
    correlation = torch.corrcoef(flat.mT) - torch.eye(flat.shape[1])
    assert correlation.abs().max() > 0.3  # of independent weights: 0.05 +- 0.05


def chosen(make=lambda: evcl.nn.mlp(4, [8]), y=Y, **given):
    """What auto chose, by the settings in force and by the record of the task."""
    one = learner(make, epochs=1, **given)
    one.learn((X, y), "a")
    record = one.card()["tasks"][0]["resolved"]
    assert record["posterior"] == one.state.run.settings.posterior
    assert record["strength"] == {"kronecker": 1.0, "diagonal": 3.0}[record["posterior"]]
    return record["posterior"]


def test_auto_says_what_it_chose():
    assert chosen() == chosen(one_softmax=True) == "kronecker"
    assert chosen(y=X[:, :1], likelihood="gaussian") == chosen(y=(X > 0).float(), likelihood="bernoulli") == "diagonal"
    assert (
        chosen(lambda: evcl.nn.mlp(4, [1025]))
        == chosen(film=True)
        == chosen(tempering=0.0, std_update="adam")
        == "diagonal"
    )
    like = evcl.nn.mlp(4, [8]).state_dict()
    prior = evcl.nn.Prior(
        {k: torch.zeros_like(w) for k, w in like.items()}, {k: torch.ones_like(w) for k, w in like.items()}
    )
    assert chosen(prior=prior) == "diagonal"
    for given, message in (({"tempering": 0.0}, "with tempering=0"), ({"prior": prior}, "a prior of your own")):
        with refused(message):
            learner(posterior="kronecker", **given)


@pytest.mark.parametrize("coreset", ["none", "random"])
def test_it_is_saved_and_copied_and_learns_on_as_it_would_have(coreset, tmp_path):
    one = learner(coreset=coreset, coreset_size=5)
    one.learn((X, Y), "a")
    one.learn((X, 1 - Y), "b")
    one.save(tmp_path / "m")
    others = evcl.load(tmp_path / "m"), copy.deepcopy(one)
    for other in others:
        assert torch.equal(other.predict_proba(X, "a"), one.predict_proba(X, "a"))
        for name, weights in one.posterior.draw(3).items():
            assert torch.equal(other.posterior.draw(3)[name], weights)
    for each in (one, *others):
        each.learn((X, Y), "c")
    assert all(same(one, other) for other in others)
