"""How often earlier rows count, against dense Hessians by autograd; and what an ELBO, a draw and a density are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evcl

N, D = 40, 3


def rows(seed, columns=range(D), n=N):
    """Two noisy classes, told apart by some of the columns; the others are 0."""
    source = np.random.default_rng(seed)
    x = np.zeros((n, D))
    x[:, columns] = source.normal(size=(n, len(columns)))
    return x, (x.sum(1) + source.normal(size=n) > 0).astype(int)


def logistic(method, **given):
    """A logistic regression with a head for each task, after the first."""
    usual = {"epochs": 30, "dtype": torch.float64}
    learner = evcl.Learner(nn.Identity(), method, **usual, **given)
    learner.learn(*rows(0), task="a")
    return learner


def dense(loss, learner):
    """The diagonal of the Hessian of a function of (weights, biases) of head 0, at the posterior's means."""
    w, b = (learner.posterior[f"head 0.{part}"].mean for part in ("weight", "bias"))
    size = w.numel()
    hessian = torch.autograd.functional.hessian(
        lambda flat: loss(flat[:size].view_as(w), flat[size:]), torch.cat([w.flatten(), b])
    )
    return hessian.diagonal()


def fisher(learner):
    """N times the Fisher of the first task: of a logistic regression, the Hessian of its NLL."""
    x, y = (torch.as_tensor(one) for one in rows(0))
    return dense(lambda w, b: F.cross_entropy(x @ w.T + b, y, reduction="sum"), learner)


def flat(learner, what):
    return torch.cat([what(learner.posterior[f"head 0.{part}"]).flatten() for part in ("weight", "bias")])


def count(h, f):
    return pytest.approx(float(h @ f / (f @ f)), rel=1e-5)


def test_the_kl_counts_as_its_precision_beyond_the_first_prior():
    learner = logistic("vcl", tempering=1.0)
    f = fisher(learner)
    h = flat(learner, lambda one: one.precision - one.first.precision())
    learner.learn(*rows(1), task="b")
    assert learner.account()["a"] == {"kl": count(h, f), "sum": count(h, f)}


@pytest.mark.parametrize("strength", [1.0, 3.0])
def test_the_elastic_term_counts_by_its_strength(strength):
    learner = logistic("ewc", strength=strength, fisher_temperature=1.0, fisher_spread=0.0)
    learner.learn(*rows(1), task="b")
    assert learner.account()["a"] == {
        "elastic": pytest.approx(strength, rel=1e-5),
        "sum": pytest.approx(strength, rel=1e-5),
    }


def test_distillation_counts_as_its_hessian():
    learner = logistic("vcl", distill=0.3, **{"distill.temperature": 2.0})
    f, (x, _) = fisher(learner), (torch.as_tensor(one) for one in rows(1, n=80))
    w0, b0 = (learner.posterior[f"head 0.{part}"].mean for part in ("weight", "bias"))
    said = ((x @ w0.T + b0) / 2).softmax(1)
    h = dense(
        lambda w, b: 0.3 * N / 80 * 4 * F.kl_div(((x @ w.T + b) / 2).log_softmax(1), said, reduction="sum"), learner
    )
    learner.learn(*rows(1, n=80), task="b")
    assert learner.account()["a"]["distillation"] == count(h, f)
    assert learner.account()["a"]["sum"] == pytest.approx(sum(list(learner.account()["a"].values())[:-1]))


def test_earlier_tasks_have_their_own_counts_where_their_fishers_differ():
    given = {"strength": 1.0, "fisher_temperature": 1.0, "fisher_spread": 0.0, "fisher_decay": 0.5}
    learner = evcl.Learner(nn.Identity(), "ewc", epochs=5, dtype=torch.float64, **given)
    for k in range(3):
        learner.learn(*rows(k, [k]), task=f"{k}")
    assert [row["sum"] for row in learner.account().values()] == pytest.approx([1.0, 1.0], abs=0.02)  # own heads
    learner = evcl.Learner(nn.Identity(), "ewc", epochs=5, dtype=torch.float64, **given)
    for k in range(3):
        learner.learn(*rows(k, [k]), task=f"{k}", head="0" if k else "new")
    first, second = (row["sum"] for row in learner.account().values())
    assert first < 0.75 < second


def test_rows_of_one_distribution_count_once_by_bayes_rule():
    source, w = np.random.default_rng(0), np.ones(4)
    learner = evcl.Learner(nn.Identity(), "vcl", likelihood="gaussian", tempering=1.0, epochs=40, batch_size=16)
    for _ in range(4):
        x = source.normal(size=(64, 4))
        learner.learn(x, x @ w + source.normal(size=64), head="0" if learner.tasks else "new")
    counts = [row["sum"] for row in learner.account().values()]
    assert counts == pytest.approx([1.0] * 3, abs=0.1)  # as near as sigma is to its optimum
    assert max(counts) - min(counts) < 1e-4


def test_it_is_empty_for_a_first_task_and_printed_as_a_table(tmp_path):
    learner = logistic("evcl")
    assert learner.account() == {}
    assert "no account" in str(learner.account())
    learner.learn(*rows(1), task="b")
    lines = str(learner.account()).splitlines()
    assert lines[0].split() == ["kl", "elastic", "distillation", "sum"]
    assert lines[1].split()[0] == "a"
    assert len(lines) == 2
    assert learner.account("a") == {}
    assert learner.account(1) == learner.account("b") == learner.account()
    assert learner.card()["tasks"][1]["account"] == learner.account()


def test_a_saved_learner_goes_on_with_its_account_and_one_of_an_earlier_release_has_none(tmp_path):
    learner = logistic("evcl")
    learner.learn(*rows(1), task="b")
    learner.save(tmp_path / "m.safetensors")
    loaded = evcl.load(tmp_path / "m.safetensors", network=nn.Identity())
    for each in (learner, loaded):
        each.learn(*rows(2), task="c")
    assert loaded.account() == learner.account()
    assert list(learner.account()) == ["a", "b"]
    description, tensors = learner.described()
    from evcl.learner.persist import rebuilt

    for record in description["records"]:
        record.pop("account", None)
    old = rebuilt(description, {k: t for k, t in tensors.items() if not k.startswith("account.")}, nn.Identity())
    old.learn(*rows(3), task="d")
    assert old.account() == {}
    assert old.elbo() == {}


def test_many_earlier_tasks_are_told_apart_up_to_a_limit():
    learner = evcl.Learner(nn.Identity(), "ewc", epochs=1, fisher_temperature=1.0, fisher_spread=0.0, strength=1.0)
    for k in range(24):
        learner.learn(*rows(k, n=16), task=f"t{k}")
    assert list(learner.account()) == ["up to t3", *(f"t{k}" for k in range(4, 23))]
    assert [row["sum"] for row in learner.account().values()] == pytest.approx([1.0] * 20, rel=0.1)


def test_it_changes_nothing_that_is_learned():
    one, other = logistic("vcl"), logistic("vcl")
    other.state.run.account = None
    for learner in (one, other):
        learner.learn(*rows(1), task="b")
    assert torch.equal(one.posterior["head 1.weight"].mean, other.posterior["head 1.weight"].mean)
    assert other.account() == {} != one.account()


def test_methods_without_a_penalty_on_the_past_have_no_account():
    learner = logistic("naive")
    learner.learn(*rows(1), task="b")
    assert learner.account() == {}
    assert learner.elbo() == {}


def test_the_elbo_of_a_first_task():
    learner = logistic("vcl", tempering=1.0)
    found, (x, y) = learner.elbo(), rows(0)
    assert found["elbo"] == -found["nll"] - found["kl"]
    assert found["kl"] == pytest.approx(learner.posterior.kl())
    draws = learner.predictions(x, draws=500).draws
    assert found["nll"] == pytest.approx(-np.log(draws[:, np.arange(N), y]).sum(1).mean(), rel=0.1)


def test_what_auto_was_is_in_the_record():
    learner = logistic("evcl")
    found = learner.card()["tasks"][0]["resolved"]
    assert found.keys() == {"posterior", "strength", "tempering", "lr", "std_rate", "init_std", "prior_std"}
    assert 0.03 <= found["tempering"] <= 0.1
    assert (found["posterior"], found["strength"]) == ("diagonal", 3.0)  # its only layer, the head, comes with the task
    first = learner.posterior["head 0.weight"].first.std()
    assert found["prior_std"]["head 0.weight"] == pytest.approx(float(first[0, 0]), rel=1e-5)
    assert learner.settings["tempering"] == "auto"
    assert logistic("evcl", tempering=0.5).card()["tasks"][0]["resolved"].keys() == found.keys() - {"tempering"}
