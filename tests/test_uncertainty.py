"""Knowing when it does not know: entropies against their definition, and the task inferred from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

import evcl


def clouds(seed=0, n=90, at=0.0):
    """Three clouds in the plane, around `at` on the first axis."""
    source = np.random.default_rng(seed)
    y = np.arange(n) % 3
    centres = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
    return source.normal(size=(n, 2)) * 0.7 + centres[y] + [at, 0.0], y


def by_hand(learner, x):
    """Each draw's probabilities [draws, N, classes], written out for a network of one hidden layer and one head."""
    found = []
    for weights in learner.state.run.draws([0]):
        w = [view[0] for view in learner.state.run.network.layout.views(weights).values()]
        hidden = linear(torch.tensor(x), w[0], w[1]).relu()
        found.append(linear(hidden, w[2], w[3]).softmax(1).numpy())
    return np.stack(found)


def entropy(p):
    return -(p * np.log(np.clip(p, 1e-300, None))).sum(-1)


@pytest.mark.parametrize("coreset", ["none", "random"])
def test_the_parts_are_what_their_definitions_say(coreset):
    x, y = clouds()
    learner = evcl.EVCL(
        evcl.nn.mlp(2, [8]), dtype=torch.float64, epochs=20, init_std=0.3, tempering=0.3, coreset=coreset
    )
    learner.learn((x, y))
    found, draws = learner.predictions(x), by_hand(learner, x)
    assert found.probabilities == pytest.approx(draws.mean(0), abs=1e-12)
    assert found.entropy == pytest.approx(entropy(draws.mean(0)), abs=1e-12)
    assert found.aleatoric == pytest.approx(entropy(draws).mean(0), abs=1e-12)
    assert found.epistemic == pytest.approx(found.entropy - found.aleatoric, abs=1e-12)
    assert found.epistemic.max() > 0.01
    assert (found.epistemic >= 0).all()
    assert (found.labels == learner.predict(x)).all()
    assert found.probabilities == pytest.approx(learner.predict_proba(x))
    assert set(found.tasks) == {"0"}


def test_plain_weights_are_never_unsure_of_themselves():
    learner = evcl.EWC(evcl.nn.mlp(2, [8]), epochs=5)
    learner.learn(clouds())
    found = learner.predictions(clouds()[0])
    assert found.epistemic == pytest.approx(np.zeros(90), abs=1e-12)
    assert found.entropy.min() > 0


def test_it_doubts_what_lies_between_the_classes_more_than_what_lies_within():
    learner = evcl.EVCL(evcl.nn.mlp(2, [32]), epochs=100, lr=0.01)
    learner.learn(clouds(n=300))
    within, between = learner.predictions(np.array([[-1.0, -1.0], [5.0, 0.0], [0.0, 5.0]])), [[2.0, 0.0], [0.0, 2.0]]
    assert learner.predictions(np.array(between)).entropy.min() > 5 * within.entropy.max()


def test_tensors_stay_tensors():
    learner = evcl.EVCL(evcl.nn.mlp(2, [8]), epochs=1)
    x, y = clouds()
    learner.learn((x, y))
    found = learner.predictions(torch.tensor(x))
    assert all(isinstance(part, torch.Tensor) for part in found._replace(tasks=found.entropy, draws=None)[:-1])


def test_the_task_is_inferred_on_a_stream_of_many_heads():
    """Measured: the task is right for 39%, by chance it would be for 20%; `perf/infer.py` has larger ones."""
    benchmark = evcl.benchmarks.get("split-digits", seed=0)
    learner = evcl.EVCL(evcl.nn.mlp(64, [100, 100]), seed=0)
    for task in benchmark:
        learner.learn(task, epochs=30)
    right = labels = count = 0
    for task in benchmark:
        x, y = task.test
        found = learner.predictions(x, "infer")
        right += int((found.tasks == task.name).sum())
        labels += int((found.labels == y).sum())
        count += len(y)
        assert torch.equal(found.labels, learner.predict(x, "infer"))
        assert torch.equal(found.probabilities, learner.predict_proba(x, "infer"))
    assert right / count > 0.3
    assert right / count * 0.9 < labels / count <= right / count  # the right label needs the right head


def test_inference_takes_the_head_that_is_least_unsure_for_its_size():
    """Against the definition: all heads asked, one by one, of different sizes and with labels in common."""
    x, y = clouds()
    learner = evcl.VCL(evcl.nn.mlp(2, [16]), dtype=torch.float64, epochs=40, lr=0.01, tempering=0.1)
    learner.learn((x, y), task="three")
    learner.learn((x + 9, np.where(y > 1, 1, y) + 2), task="two")
    learner.learn((x + 9, np.where(y > 1, 1, y) + 2), task="more of two", head="two")
    probes = np.random.default_rng(1).uniform(-12, 15, size=(300, 2))
    each = {name: learner.predictions(probes, name) for name in ("three", "two")}
    relative = np.stack([each["three"].entropy / np.log(3), each["two"].entropy / np.log(2)])
    best = relative.argmin(0)
    assert {0, 1} == set(best.tolist())
    found = learner.predictions(probes, "infer")
    assert (found.tasks == np.array(["three", "two"])[best]).all()
    assert learner.classes("infer") == (0, 1, 2, 3)
    for row, k in enumerate(best):
        own = each[("three", "two")[k]]
        wanted = np.zeros(4)
        wanted[[0, 1, 2] if k == 0 else [2, 3]] = own.probabilities[row]
        assert found.probabilities[row] == pytest.approx(wanted, abs=1e-12)
        assert found.epistemic[row] == pytest.approx(own.epistemic[row], abs=1e-12)
        assert found.labels[row] == own.labels[row]


def test_one_head_needs_no_inference_and_labels_of_two_kinds_allow_none():
    x, y = clouds()
    learner = evcl.EVCL(evcl.nn.mlp(2, [8]), epochs=1)
    with pytest.raises(evcl.EvclError, match="nothing has been learned yet"):
        learner.predict(x, "infer")
    learner.learn((x, y))
    assert (learner.predict(x, "infer") == learner.predict(x)).all()
    learner.learn((x, y.astype(str)))
    with pytest.raises(evcl.EvclError, match="must have one type"):
        learner.predict(x, "infer")
    with pytest.raises(evcl.EvclError, match="other than 'new' and 'infer', not 'infer'"):
        learner.learn((x, y), task="infer")
