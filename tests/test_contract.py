"""One contract for every registered method, a user's own among them, over every embedded benchmark.

EVCL_PLUGINS=mine.py pytest -m "not soak" -k my-name tests/test_contract.py tests/contract   adds one of yours.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checks import same, state

import evcl
from evcl.benchmarks import BENCHMARKS
from evcl.methods import METHODS

EMBEDDED = [name for name in BENCHMARKS if name.endswith("-digits") and not name.startswith("characters")]
pytestmark = [
    pytest.mark.parametrize("method", list(METHODS)),
    pytest.mark.parametrize("name", EMBEDDED),
]
EPOCHS = 20
# with its sigma_0 of 1e-4, a task this short leaves a prior that pins every weight
OWN = {"evcl-paper": {"init_std": 0.05, "tempering": 0.01, "batch_size": 64, "lr": 0.005}}


def learner(method, benchmark):
    return evcl.Learner(evcl.nn.mlp(benchmark.inputs, [50]), method, seed=1, **OWN.get(method, {}))


def learn(one, tasks):
    """For 20 epochs, or the method's own number if that is smaller: a filter makes one pass."""
    epochs = min(EPOCHS, one.settings.epochs)
    if one.method.jointly:
        return one.learn_jointly(tasks, epochs=epochs)
    return [one.learn(task, epochs=epochs) for task in tasks]


def test_it_learns_and_goes_on_after_save_and_load(method, name, tmp_path):
    benchmark = evcl.benchmarks.get(name, tasks=3)
    one = learner(method, benchmark)
    assert learn(one, benchmark[:2]) == [task.name for task in benchmark[:2]]
    accuracy = one.evaluate(benchmark[:2])
    chance = 1 / len(benchmark[0].classes)
    assert accuracy[benchmark[1].name] > chance + 0.4 * (1 - chance)
    assert min(accuracy.values()) > chance

    p = one.predict_proba(benchmark[1].test.x, task=1)
    assert p.shape == (len(benchmark[1].test), len(benchmark[1].classes))
    torch.testing.assert_close(p.sum(1), torch.ones(len(p)))
    assert set(one.predict(benchmark[1].test.x, task=1).tolist()) <= set(benchmark[1].classes)

    path = tmp_path / "model.safetensors"
    one.save(path)
    two = evcl.load(path)
    assert same(one, two)
    assert torch.equal(p, two.predict_proba(benchmark[1].test.x, task=1))
    assert two.tasks == one.tasks
    for each in (one, two):  # learn; save; load; learn = learn; learn
        learn(each, benchmark[2:])
    assert same(one, two)
    assert one.evaluate(benchmark) == two.evaluate(benchmark)


def test_it_is_a_function_of_its_seed(method, name):
    benchmark = evcl.benchmarks.get(name, tasks=1)
    states = []
    for seed in (0, 0, 1):
        one = evcl.Learner(evcl.nn.mlp(benchmark.inputs, [10]), method, seed=seed, epochs=1)
        if one.method.jointly:
            one.learn_jointly(benchmark)
        else:
            one.learn(benchmark[0])
        states.append(state(one))
    assert same(states[0], states[1])
    assert not torch.equal(states[0]["posterior.mean"], states[2]["posterior.mean"])


def test_it_refuses_bad_input_and_stays_as_it_was(method, name):
    benchmark = evcl.benchmarks.get(name, tasks=2)
    one = learner(method, benchmark)
    with pytest.raises(evcl.EvclError, match="nothing has been learned yet"):
        one.predict(benchmark[0].test.x)
    learn(one, benchmark[:1])
    before = state(one)
    x, y = (part[:20].numpy() for part in benchmark[1].train)
    holed = x.copy()
    holed[3, 5] = np.nan
    bad = [
        ((holed, y), "NaN or infinity"),
        ((x, y + 0.5), "for numbers, make the learner with"),
        ((x[:, :9], y), "numbers per example"),
    ]
    if one.method.jointly:
        with pytest.raises(evcl.EvclError, match="use learn_jointly"):
            one.learn((x, y))
    else:
        for data, message in bad:
            with pytest.raises(evcl.EvclError, match=message):
                one.learn(data)
    with pytest.raises(evcl.EvclError, match="NaN or infinity"):
        one.predict(holed)
    with pytest.raises(evcl.EvclError, match="unknown setting"):
        evcl.Learner(evcl.nn.mlp(3, [3]), method, no_such_setting=1)
    assert same(one, before)
    assert len(one.tasks) == 1
