"""A user's own stream."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import evcl
from evcl.benchmarks import BENCHMARKS, Entry, from_arrays, from_datasets, from_stream, get, permute, register, split

SOURCE = np.random.default_rng(0)
X, Y = SOURCE.normal(size=(60, 4)), np.arange(60) % 4


PAIRS = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
TRIPLES = TensorDataset(*PAIRS.tensors, PAIRS.tensors[1] // 2)  # (x, y, task): two classes per task
FOURS = TensorDataset(*TRIPLES.tensors, PAIRS.tensors[1])


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


def test_groups_of_classes_can_be_an_array():
    benchmark = split(X, Y, classes=np.array([[0, 1], [2, 3]]))
    assert [t.classes for t in benchmark] == [(0, 1), (2, 3)]
    assert {type(label) for t in benchmark for label in t.classes} == {int}


def test_a_stream_of_ones_own_has_a_validation_part_too():
    """Permuted tasks go on sharing their inputs, and each shows them in its own order."""
    whole = permute(X, Y, tasks=50)
    cut = whole.hold_out(0.25)
    assert {len(t.validation) for t in cut} == {12}
    assert {len(t.train) for t in cut} == {36}
    for part in ("train", "validation", "test"):
        assert len({getattr(t, part).inputs.data_ptr() for t in cut}) == 1
        assert all(getattr(t, part).permutation is w.train.permutation for t, w in zip(cut, whole, strict=True))
    assert whole.hold_out(0) is whole
    with pytest.raises(evcl.EvclError, match="validation must be"):
        whole.hold_out(1.5)


def _register(name, **says):
    """A benchmark of two tasks, as CONTRIBUTING shows it: `build` looks at nothing it is asked."""

    def build(request):
        return from_arrays([arrays(0, 1), arrays(2, 3)])

    return register(Entry(name, "mine", build, seeded=False, **says))


@pytest.fixture
def mine():
    yield _register("mine", tasks=2, most_tasks=2)
    BENCHMARKS.remove("mine")


def test_a_registered_benchmark_is_cut_to_what_is_asked(mine):
    """Were `validation` left to `build`, a run that asks for it would be measured on test data."""
    assert len(get("mine")) == 2
    assert len(get("mine", tasks=1)) == 1
    for task, whole in zip(get("mine", validation=0.1), get("mine"), strict=True):
        assert task.held_out is task.validation
        assert (len(task.validation), len(task.train)) == (2, 18)
        assert torch.equal(task.test.x, whole.test.x)


def test_a_registered_benchmark_with_fewer_tasks_than_it_says_is_refused():
    _register("mistaken")
    try:
        with pytest.raises(evcl.EvclError, match=r"mistaken has 2 tasks, not 5: set tasks and most_tasks in its Entry"):
            get("mistaken")
    finally:
        BENCHMARKS.remove("mistaken")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_arrays([]), "there are no tasks"),
        (
            lambda: from_arrays([arrays(0, 1)[:3]]),
            "y_test) for each, but task 0 is something else",
        ),
        (lambda: from_arrays(arrays(0, 1)), "for each, but task 0 is something else"),
        (lambda: from_arrays(5), "there are no tasks"),
        (lambda: from_arrays([arrays(0, 1)], names=["a", "b"]), "1 tasks need 1 different names"),
        (lambda: from_arrays([arrays(0, 1)], heads="one"), "heads must be 'separate' or 'shared'"),
        (lambda: from_arrays([(X, Y, X[:, :3], Y)]), "the shape of its inputs differs"),
        (lambda: from_arrays([(X, Y % 2, X, Y)]), "the test labels [2, 3] are not in its training set"),
        (lambda: from_arrays([(X, Y.astype(float), X, Y)]), "task '0', train: labels are float64"),
        (lambda: from_arrays([(X, Y.astype(str), X, Y)]), "these are text"),
        (lambda: from_arrays([(X * np.nan, Y, X, Y)]), "task '0', train: the inputs contain NaN"),
        (lambda: from_datasets([(iter([]), iter([]))]), "needs len() and indexing"),
        (lambda: split(X, Y, classes=[[0, 9]]), "but not [9]"),
        (lambda: split(X, Y, classes=[[0, 1]], test=1.5), "test must be a fraction between 0 and 1"),
        (lambda: split(X, Y, classes=[[0, 1]], test="0.2"), "not '0.2'"),
        (lambda: split(X, Y, classes=[[0, 1]], test=(X,)), "or a pair (x, y), not 1 things"),
        (lambda: split(X, Y, classes=[[0, 1]], test=(X[:1], Y[:1])), "the test data has the classes [0], but not [1]"),
        (lambda: split(X, Y, classes=[0, 1]), "groups of whole numbers like [[0, 1], [2, 3]], not [0, 1]"),
        (lambda: permute(X, Y, test=(X[:, :3], Y)), "the shape of its inputs differs"),
        (lambda: permute(X, Y % 2, test=(X, Y)), "the test labels [2, 3] are not in the training set"),
        (lambda: permute(X, Y, seed=-1), "seed must be"),
        (lambda: from_datasets([PAIRS, PAIRS]), "(training, test) for each, but task 0 is something else"),
        (lambda: from_datasets([(FOURS, FOURS)]), "items must be (x, y), or (x, y, task)"),
        (lambda: from_stream(5, 5), "must have one data set per task, or be a data set with items (x, y, task)"),
        (lambda: from_stream([], []), "the training stream has no tasks"),
        (lambda: from_stream([PAIRS] * 3, [PAIRS] * 2), "has 3 tasks, but the test stream has 2"),
        (lambda: from_stream([PAIRS] * 2, [PAIRS] * 2, scenario="none"), "scenario must be one of"),
        (lambda: permute(X, Y, tasks=0), "tasks must be a whole number of at least 1"),
    ],
)
def test_bad_data_is_one_clear_line(make, message):
    with pytest.raises(evcl.EvclError) as error:
        make()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_third_part_of_an_item_is_not_needed():
    ours, plain = from_datasets([(TRIPLES, TRIPLES)]), from_datasets([(PAIRS, PAIRS)])
    assert torch.equal(ours[0].train.x, plain[0].train.x)
    assert torch.equal(ours[0].test.y, plain[0].test.y)


def test_a_stream_of_x_y_task_is_split_by_its_tasks():
    stream = from_stream(TRIPLES, TRIPLES)
    numbers = TRIPLES.tensors[2].unique().tolist()
    assert [task.name for task in stream] == [f"task {k}" for k in numbers]
    for k, task in zip(numbers, stream, strict=True):
        assert torch.equal(task.train.x, TRIPLES.tensors[0][TRIPLES.tensors[2] == k].float())
        assert task.head == "task 0"  # class-incremental: no two tasks have a class in common
    assert stream[-1].classes == tuple(sorted(TRIPLES.tensors[1].unique().tolist()))
    assert [task.head for task in from_stream(TRIPLES, TRIPLES, scenario="task")] == [task.name for task in stream]


def test_a_stream_of_data_sets_with_the_same_classes_is_domain_incremental():
    stream = from_stream([PAIRS, PAIRS, PAIRS], [PAIRS])  # one test set for all tasks
    assert {task.head for task in stream} == {"task 0"}
    assert len({task.classes for task in stream}) == 1
    assert all(torch.equal(task.test.y, PAIRS.tensors[1]) for task in stream)
