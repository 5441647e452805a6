"""The ways to hand data to a learner, and what it measures on them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from checks import blobs, refused, same
from torch.utils.data import DataLoader, TensorDataset

import evcl

TINY = float(np.finfo(np.float32).tiny)


def small(method="ewc", **options):
    return evcl.Learner(evcl.nn.mlp(4, [8]), method, **{"epochs": 2, **options})


# --- learn(x, y), classes= -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy, lambda array: array.tolist()])
def test_inputs_and_labels_one_after_the_other(kind):
    x, y = blobs()
    pair, two = small(), small()
    pair.learn((kind(x), kind(y)), head="new", epochs=3)
    assert two.learn(kind(x), kind(y), "new", 3) == "0"
    assert same(pair, two)
    assert two.learn(kind(x), kind(y), head="0") == "1"  # it is named by its number
    assert two.learn(kind(x), kind(y), task="named", head="0") == "named"
    assert two.heads == ("0",)


def test_labels_of_text_one_after_the_other():
    x, y = blobs(("cat", "dog"))
    learner = small(epochs=60, lr=0.03)
    learner.learn(x, y)
    assert learner.tasks == ("0",)
    assert (learner.predict(x) == y).mean() > 0.9


@pytest.mark.parametrize("y", [3, 0.5, True])
def test_a_number_is_no_array_of_labels(y):
    learner = small()
    with pytest.raises(evcl.EvclError, match="a task's name must be text other than 'new' and 'infer', not "):
        learner.learn(blobs()[0], y)
    with pytest.raises(evcl.EvclError, match="the task has two names, 'a' and 'b': pass labels with the inputs"):
        learner.learn(blobs(), "a", task="b")
    with pytest.raises(evcl.EvclError, match="there are 60 inputs but 2 labels"):
        learner.learn(blobs()[0], [0, 1])
    assert learner.tasks == ()


@pytest.mark.filterwarnings("ignore::evcl.ForgettingWarning")
def test_classes_that_the_data_does_not_have():
    x, y = blobs((5, 7))
    learner = small()
    learner.learn(x, y, classes=[9, 7, 5])
    assert learner.classes() == (9, 7, 5)  # in the order that was said
    assert learner.predict_proba(x).shape == (60, 3)
    learner.learn(x, np.full(60, 9), head="0", classes=(1, 9))
    assert learner.classes() == (9, 7, 5, 1)
    one = small()
    one.learn(x, np.full(60, 5), task="a", classes=iter([5, 6]))  # one class alone is no head
    assert one.classes() == (5, 6)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (["a", "b"], "all integers or all strings"),
        ([0.5, 1.5], "labels are float64"),
        ([[0, 1]], "labels must have shape"),
        ([None], "64-bit integers or strings"),
    ],
)
def test_bad_classes_are_refused(classes, message):
    learner = small()
    with pytest.raises(evcl.EvclError, match=message):
        learner.learn(*blobs(), classes=classes)
    assert learner.heads == ()


# --- measure -------------------------------------------------------------------------------------------------------

X = np.random.default_rng(1).normal(size=(40, 4)).astype(np.float32)
Y = np.array([3, 8, 8, 3] * 10)


@pytest.fixture(scope="module")
def known():
    """A learner with two heads, of which one knows texts."""
    learner = small()
    learner.learn(blobs((3, 8)), "a")
    learner.learn(blobs(("x", "y")), "b")
    return learner


def assert_measured(learner, data, task, y, x=X):
    """By hand, but for the calibration error, which test_metrics.py works out."""
    found, p = learner.measure(data, task), learner.predict_proba(x, task).astype(float)
    classes = list(learner.classes(task))
    places = [classes.index(label) if label in classes else None for label in y]
    right = [row.argmax() == place for row, place in zip(p, places, strict=True)]
    nll = [-math.log(max(TINY, 0 if place is None else row[place])) for row, place in zip(p, places, strict=True)]
    wanted = evcl.metrics.expected_calibration_error(
        np.concatenate([p, np.zeros((len(p), 1))], 1), [2 if place is None else place for place in places]
    )
    assert isinstance(found, evcl.learner.Measures)
    assert found == pytest.approx((np.mean(right), np.mean(nll), wanted), abs=1e-6)
    assert (found.accuracy, found.nll, found.ece) == tuple(found)
    assert all(type(value) is float for value in found)


def test_a_pair_a_dataset_and_batches(known):
    x, labels = torch.from_numpy(X), torch.tensor(Y)
    batches = DataLoader(TensorDataset(x, labels), batch_size=3, generator=torch.Generator())
    for data in ((X, Y), (x, labels), TensorDataset(x, labels), batches):
        for task in ("a", 0):
            assert_measured(known, data, task, Y)
    assert_measured(known, (X, np.where(Y == 3, "x", "y")), "b", np.where(Y == 3, "x", "y"))
    assert known.measure((X, Y), "a") != known.measure((X, Y), "b")


def test_labels_that_the_head_does_not_know(known):
    for y in ([5, *Y[1:]], ["x"] * 40):
        assert_measured(known, (X, y), "a", y)


def test_a_label_of_probability_0(known):
    x = np.full((1, 4), 1e6, np.float32)
    assert sorted(known.predict_proba(x, "a")[0]) == [0, 1]
    for label in (3, 8):
        assert_measured(known, (x, [label]), "a", [label], x)


def test_a_benchmarks_task_is_measured_on_its_test_set():
    benchmark = evcl.benchmarks.get("split-digits", tasks=2)
    learner = evcl.EWC(evcl.nn.mlp(64, [20]), epochs=3)
    for task in benchmark:
        learner.learn(task)
    for task in benchmark:
        found = learner.measure(task)
        p, y = learner.predict_proba(task.test.x, task.name).double(), task.test.y
        places = torch.tensor([learner.classes(task.name).index(label) for label in y.tolist()])
        assert found.accuracy == pytest.approx(learner.evaluate([task])[task.name])
        assert found.nll == pytest.approx(float(-p[torch.arange(len(y)), places].log().mean()))
        assert found == learner.measure((task.test.x, y), task.name) == learner.measure(task.test, task.name)
    with pytest.raises(evcl.EvclError, match="unknown task '4/5'"):
        learner.measure(evcl.benchmarks.get("split-digits")[2])
    assert learner.measure(benchmark[0]) != learner.measure(benchmark[0], benchmark[1].name)  # the head that is named


def test_bad_questions_are_refused(known):
    for data, task, message in [
        ((X, Y), None, "there are 2 heads: choose a task"),
        ((X, Y), "c", "unknown task 'c'"),
        ((X, [3] * 3), "a", "there are 40 inputs but 3 labels"),
        ((X[:, :3], Y), "a", "takes 4 numbers per example, not 3"),
        ((X[:0], []), "a", "the inputs are empty"),
        ("data.csv", "a", "measure takes a Task, a pair"),
    ]:
        with refused(message):
            known.measure(data, task)
    with pytest.raises(evcl.EvclError, match="nothing has been learned yet"):
        small().measure((X, Y))
