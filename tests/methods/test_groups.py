"""A head of several softmaxes, of new classes or of domains of the same classes: what holds for both."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from interrupted import assert_stopped_run_ends_the_same
from sklearn.covariance import oas
from small_runs import same

import evcl
from evcl.experiments import configure, execute

KINDS = ("class", "domain")
DIGITS = {kind: evcl.benchmarks.get("split-digits", scenario=kind) for kind in KINDS}
X = torch.cat([task.test.x for task in DIGITS["class"]])
PERMUTED = evcl.benchmarks.get("permuted-digits", tasks=4)


def learned(tasks, shared=True, width=30, **given):
    """A learner of these tasks, in one head or in a head for each."""
    learner = evcl.EVCL(evcl.nn.mlp(64, [width]), **{"epochs": 10, **given})
    for k, task in enumerate(tasks):
        learner.learn((task.train.x, task.train.y), str(k), "0" if shared and k else "new")
    return learner


@cache
def five(kind):
    """A learner of all five tasks in one head, which no test changes."""
    return learned(DIGITS[kind])


def groups(learner):
    return learner.state.session.groups["0"]


def stream(method="evcl", seeds=(0,), benchmark="split-digits", **given):
    return configure(benchmark, method, "default", seeds, tasks=3, given={"scenario": "domain", "epochs": 5, **given})


def covariance(scatter, rows):
    """That of features with this scatter about the means of their classes."""
    part = scatter.double() / float(rows)
    squares, trace, n = float(part.square().sum()), float(part.trace()), float(rows)
    rho = min(1.0, (squares + trace**2) / ((n + 1) * (squares - trace**2 / len(part))))
    return (1 - rho) * part + rho * trace / len(part) * torch.eye(len(part), dtype=part.dtype)


def test_the_covariance_is_shrunk_as_scikit_learn_does_it():
    x = torch.randn(30, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * torch.arange(1, 13)
    torch.testing.assert_close(covariance(x.T @ x, 30), torch.from_numpy(oas(x.numpy(), assume_centered=True)[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_uncertainty_adds_up(kind):
    found = five(kind).predictions(X)
    torch.testing.assert_close(found.probabilities.sum(1), torch.ones(len(X)))
    torch.testing.assert_close(found.probabilities, five(kind).predict_proba(X))
    torch.testing.assert_close(found.entropy, torch.special.entr(found.probabilities).sum(1))
    assert float(found.epistemic.min()) > -1e-5
    wrong = found.labels != torch.cat([task.test.y for task in DIGITS[kind]])
    assert float(found.entropy[wrong].mean()) > 3 * float(found.entropy[~wrong].mean())


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_it_goes_on_as_if_it_had_not_been(kind, tmp_path):
    """Also with rows of two groups at once."""
    learner, tasks = learned(DIGITS[kind][:4], epochs=3), DIGITS[kind]
    learner.save(tmp_path / "m")
    back = evcl.load(tmp_path / "m")
    assert groups(back) == groups(learner)
    assert torch.equal(back.predict_proba(X), learner.predict_proba(X))
    mixed = (1, 3) if kind == "class" else (1,)
    some = [torch.cat([getattr(tasks[k].train, part)[:60] for k in mixed]) for part in "xy"]
    for one in (learner, back):
        one.learn((tasks[4].train.x, tasks[4].train.y), "4", "0")
        one.learn(tuple(some), "more", "0", epochs=2)
    assert back.state.session.seen == [0, 1, 2, 3, 4, *mixed]
    assert same(learner, back)
    assert back.measure((X, torch.cat([task.test.y for task in tasks]))).accuracy > 0.85


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_task_leaves_no_group(kind):
    class Fails(evcl.Callback):
        def end_epoch(self, epoch):
            raise RuntimeError("on purpose")

    learner, new = five(kind), PERMUTED[1].train
    before = learner.predict_proba(X)
    with pytest.raises(RuntimeError, match="on purpose"):
        learner.learn((new.x, new.y + 10 if kind == "class" else new.y % 2), "other", "0", callbacks=[Fails()])
    assert len(groups(learner)) == 5
    assert "other" not in learner.state.session.domains
    assert torch.equal(learner.predict_proba(X), before)


@pytest.mark.full
@pytest.mark.parametrize(
    ("benchmark", "method", "scenario"),
    [
        ("split-digits", "evcl", "class"),
        ("split-digits", "evcl", "domain"),
        ("permuted-digits", "evcl-er", "domain"),
    ],
)
def test_a_stream_is_interrupted_and_resumed_and_seeds_are_each_alone(benchmark, method, scenario, tmp_path):
    config, *each = (stream(method, seeds, benchmark, scenario=scenario) for seeds in ((0, 1), (0,), (1,)))
    whole = execute(config)
    assert whole.average_accuracy.mean > 0.9
    assert [execute(one).accuracy[0] for one in each] == whole.accuracy
    assert_stopped_run_ends_the_same(config, tmp_path)
