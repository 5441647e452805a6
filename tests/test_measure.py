"""The ways to hand data to a learner, and what it measures on them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import evcl

TINY = float(np.finfo(np.float32).tiny)


def blobs(labels=(0, 1), n=60, seed=0):
    source = np.random.default_rng(seed)
    y = np.arange(n) % len(labels)
    return (source.normal(size=(n, 4)) + 3 * y[:, None]).astype(np.float32), np.array(labels)[y]


def small(method="ewc", **options):
    return evcl.Learner(evcl.nn.mlp(4, [8]), method, **{"epochs": 2, **options})


def weights(learner):
    return learner.parts.run.network.posterior.mean


# --- learn(x, y), classes= -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy, lambda array: array.tolist()])
def test_inputs_and_labels_one_after_the_other(kind):
    x, y = blobs()
    pair, two = small(), small()
    pair.learn((kind(x), kind(y)), head="new", epochs=3)
    assert two.learn(kind(x), kind(y), "new", 3) == "0"
    assert torch.equal(weights(pair), weights(two))
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

P = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.7, 0.3]])
X = np.zeros((4, 4), np.float32)
# Right but for the second, which was thought to be 0.6 sure. The four confidences lie in bins of their own.
ACCURACY, NLL = 3 / 4, -math.log(0.9 * 0.4 * 0.8 * 0.7) / 4
ECE = (abs(1 - 0.9) + abs(0 - 0.6) + abs(1 - 0.8) + abs(1 - 0.7)) / 4


@pytest.fixture
def known(monkeypatch):
    """A learner that predicts P through each of its two heads, and notes through which."""
    learner = small()
    learner.learn(blobs((3, 8)), "a")
    learner.learn(blobs(("x", "y")), "b")
    asked = []

    def predict(x, head, draws=None, task=None):
        asked.append((head, task))
        return P[None, : x.shape[1]]

    monkeypatch.setattr(learner.parts.run, "predict", predict)
    return learner, asked


def close(found, accuracy, nll, ece):
    assert isinstance(found, evcl.learner.Measures)
    assert found == pytest.approx((accuracy, nll, ece), abs=1e-6)
    assert (found.accuracy, found.nll, found.ece) == tuple(found)
    assert all(type(value) is float for value in found)


def test_a_pair_a_dataset_and_batches(known):
    learner, asked = known
    y = [3, 8, 8, 3]
    x, labels = torch.from_numpy(X), torch.tensor(y)
    batches = DataLoader(TensorDataset(x, labels), batch_size=3, generator=torch.Generator())
    for data in ((X, y), (x, labels), TensorDataset(x, labels), batches):
        close(learner.measure(data, "a"), ACCURACY, NLL, ECE)
        close(learner.measure(data, 0), ACCURACY, NLL, ECE)
    assert set(asked) == {(0, 0)}
    close(learner.measure((X, ["x", "y", "y", "x"]), "b"), ACCURACY, NLL, ECE)
    assert asked[-1] == (1, 1)


def test_labels_that_the_head_does_not_know(known):
    learner, _ = known
    nll = -math.log(TINY * 0.4 * 0.8 * 0.7) / 4
    ece = (0.9 + 0.6 + 0.2 + 0.3) / 4  # the first is wrong now
    close(learner.measure((X, [5, 8, 8, 3]), "a"), 2 / 4, nll, ece)
    close(learner.measure((X, ["x"] * 4), "a"), 0.0, -math.log(TINY), (0.9 + 0.6 + 0.8 + 0.7) / 4)


def test_a_label_of_probability_0(known, monkeypatch):
    learner, _ = known
    monkeypatch.setattr(learner.parts.run, "predict", lambda *_, **__: torch.tensor([[[1.0, 0.0]]]))
    close(learner.measure((X[:1], [8]), "a"), 0.0, -math.log(TINY), 1.0)
    close(learner.measure((X[:1], [3]), "a"), 1.0, 0.0, 0.0)


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
    learner, _ = known
    for data, task, message in [
        ((X, [3] * 4), None, "there are 2 heads: choose a task"),
        ((X, [3] * 4), "c", "unknown task 'c'"),
        ((X, [3] * 3), "a", "there are 4 inputs but 3 labels"),
        ((X[:, :3], [3] * 4), "a", "takes 4 numbers per example, not 3"),
        ((X[:0], []), "a", "the inputs are empty"),
        ("data.csv", "a", "measure takes a Task, a pair"),
    ]:
        with pytest.raises(evcl.EvclError, match=message) as error:
            learner.measure(data, task)
        assert "\n" not in str(error.value)
    with pytest.raises(evcl.EvclError, match="nothing has been learned yet"):
        small().measure((X, [3] * 4))
