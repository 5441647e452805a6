"""A user's own stream."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import evcl
from evcl.benchmarks import from_arrays, from_datasets, permute, split

SOURCE = np.random.default_rng(0)
X, Y = SOURCE.normal(size=(60, 4)), np.arange(60) % 4


def arrays(*labels):
    rows = np.isin(Y, labels)
    x, y = X[rows], Y[rows]
    return x[:20], y[:20], x[20:], y[20:]


def test_tasks_from_arrays_are_learned():
    benchmark = from_arrays([arrays(0, 1), arrays(2, 3)], names=["first", "second"])
    assert [(t.name, t.head, t.classes) for t in benchmark] == [
        ("first", "first", (0, 1)),
        ("second", "second", (2, 3)),
    ]
    assert torch.equal(benchmark[0].train.x, torch.from_numpy(arrays(0, 1)[0]).float())
    learner = evcl.EVCL(evcl.nn.mlp(4, [8]), epochs=1)
    for task in benchmark:
        learner.learn(task)
    assert list(learner.evaluate(benchmark)) == ["first", "second"]


def test_a_shared_head_knows_all_classes_from_the_start():
    benchmark = from_arrays([arrays(0, 1), arrays(1, 3)], heads="shared")
    assert [(t.name, t.head, t.classes) for t in benchmark] == [("0", "0", (0, 1, 3)), ("1", "0", (0, 1, 3))]
    learner = evcl.EVCL(evcl.nn.mlp(4, [8]), epochs=1)
    for task in benchmark:
        learner.learn(task)
    assert learner.predict_proba(X).shape == (60, 3)


def test_torch_data_sets():
    train, test = (
        TensorDataset(torch.from_numpy(X[p]).float(), torch.from_numpy(Y[p])) for p in (slice(40), slice(40, 60))
    )
    benchmark = from_datasets([(train, test)])
    assert torch.equal(benchmark[0].train.x, torch.from_numpy(X[:40]).float())
    assert benchmark[0].test.y.tolist() == Y[40:].tolist()

    class Plain(Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, i):
            return X[i], int(Y[i])

    assert len(from_datasets([(Plain(), Plain())])[0].train) == 6


def test_splitting_and_permuting_ones_own_data():
    benchmark = split(X, Y, classes=[[0, 1], [3, 2]])
    assert [t.name for t in benchmark] == ["0/1", "3/2"]
    assert sum(len(t.test) for t in benchmark) == 12
    given = split(X[:40], Y[:40], classes=[[0, 1]], test=(X[40:], Y[40:]))
    assert len(given[0].train) == 20
    images = X.reshape(60, 2, 2)
    mixed = permute(images, Y, tasks=3, seed=1)
    assert len(mixed) == 3
    assert {t.head for t in mixed} == {"permutation 0"}
    assert mixed[0].train.inputs.data_ptr() == mixed[2].train.inputs.data_ptr()
    assert torch.equal(mixed[1].train.x, permute(images, Y, tasks=3, seed=1)[1].train.x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_arrays([]), "there is no task"),
        (lambda: from_arrays([arrays(0, 1)[:3]]), "must be (x_train, y_train, x_test, y_test), not 3 things"),
        (lambda: from_arrays([arrays(0, 1)], names=["a", "b"]), "1 different names are needed"),
        (lambda: from_arrays([arrays(0, 1)], heads="one"), "heads must be 'separate' or 'shared'"),
        (lambda: from_arrays([(X, Y, X[:, :3], Y)]), "another shape"),
        (lambda: from_arrays([(X, Y % 2, X, Y)]), "the test labels [2, 3] are not in its training set"),
        (lambda: from_arrays([(X, Y.astype(float), X, Y)]), "task '0', train: labels are float64"),
        (lambda: from_arrays([(X, Y.astype(str), X, Y)]), "these are text"),
        (lambda: from_arrays([(X * np.nan, Y, X, Y)]), "task '0', train: the inputs hold NaN"),
        (lambda: from_datasets([(iter([]), iter([]))]), "needs len() and an index"),
        (lambda: split(X, Y, classes=[[0, 9]]), "[9] is not among them"),
        (lambda: split(X, Y, classes=[[0, 1]], test=1.5), "test must be a part between 0 and 1"),
        (lambda: permute(X, Y, tasks=0), "tasks must be a whole number of at least 1"),
    ],
)
def test_bad_data_is_one_clear_line(make, message):
    with pytest.raises(evcl.EvclError) as error:
        make()
    assert message in str(error.value)
    assert "\n" not in str(error.value)
