"""Continuum's scenarios as benchmarks, and its task sets as tasks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from others import needed

import evcl

needed("continuum")
from continuum.datasets import InMemoryDataset  # noqa: E402
from continuum.scenarios import ClassIncremental, ContinualScenario, InstanceIncremental, Permutations  # noqa: E402
from continuum.tasks import TaskType  # noqa: E402

from evcl.integrations.continuum import from_continuum  # noqa: E402

DIGITS = evcl.benchmarks.get("permuted-digits", tasks=1)[0]


def data(part, kind=TaskType.TENSOR, **options):
    return InMemoryDataset(part.inputs.numpy().astype("float32"), part.y.numpy(), data_type=kind, **options)


def both(make):
    return make(data(DIGITS.train)), make(data(DIGITS.test, train=False))


def test_class_incremental():
    train, test = both(lambda d: ClassIncremental(d, increment=2))
    found = from_continuum(train, test)
    assert [task.classes for task in found] == [tuple(range(2 * k + 2)) for k in range(5)]
    assert {task.head for task in found} == {"task 0"}
    x, y, _ = train[1][3]
    assert torch.equal(found[1].train.x[3], x)
    assert int(found[1].train.y[3]) == int(y)
    apart = from_continuum(train, test, scenario="task")
    assert [(task.head, task.classes) for task in apart][1] == ("task 1", (2, 3))


def test_instance_incremental_and_permutations_are_domain_incremental():
    def given(d, n):
        return InMemoryDataset(d.inputs.numpy().astype("float32"), d.y.numpy(), np.arange(len(d)) % n, TaskType.TENSOR)

    train, test = (ContinualScenario(given(part, 3)) for part in (DIGITS.train, DIGITS.test))
    found = from_continuum(train, test)
    assert len(found) == 3
    assert {task.head for task in found} == {"task 0"}
    assert sum(len(task.train) for task in found) == len(DIGITS.train)
    train, test = both(lambda d: InstanceIncremental(d, nb_tasks=2))
    assert len(from_continuum(train, test)) == 2
    images = [
        InMemoryDataset(
            (part.x[:300].reshape(-1, 8, 8, 1).repeat(1, 1, 1, 3) * 255).byte().numpy(), part.y[:300].numpy()
        )
        for part in (DIGITS.train, DIGITS.test)
    ]
    train, test = (Permutations(d, nb_tasks=2, seed=0, shared_label_space=True) for d in images)
    found = from_continuum(train, test)
    assert found[0].train.x.shape == (300, 3, 8, 8)
    assert not torch.equal(found[0].train.x, found[1].train.x)


def test_a_task_set_is_learned_as_it_is():
    train, test = both(lambda d: ClassIncremental(d, increment=5))
    direct, by_benchmark = (evcl.EVCL(evcl.nn.mlp(64, [20]), epochs=3) for _ in range(2))
    for k, task_set in enumerate(train):
        direct.learn(task_set, task=f"task {k}", head="task 0" if k else "new")
    for task in from_continuum(train, test):
        by_benchmark.learn(task)
    for k, task_set in enumerate(test):
        measures = [learner.measure(task_set, f"task {k}") for learner in (direct, by_benchmark)]
        assert measures[0] == measures[1]
        assert measures[0].accuracy > 0.5


def test_what_cannot_be_read_is_one_clear_line():
    train, test = both(lambda d: ClassIncremental(d, increment=2))
    with pytest.raises(evcl.EvclError, match="train must be a Continuum scenario, such as ClassIncremental, not list"):
        from_continuum([], test)
    with pytest.raises(evcl.EvclError, match="has 5 tasks, but the test stream has 2"):
        from_continuum(train, ClassIncremental(data(DIGITS.test), increment=5))
    text = InMemoryDataset(np.array(["a", "b"]), np.array([0, 1]), data_type=TaskType.TEXT)
    with pytest.raises(evcl.EvclError, match="data of the type TEXT"):
        from_continuum(train, ClassIncremental(text, increment=1))
