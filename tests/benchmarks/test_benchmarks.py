from __future__ import annotations

import pytest
import torch

import evcl
from evcl.benchmarks import stratified


def rows(x):
    return {tuple(r) for r in x.flatten(1).tolist()}


@pytest.mark.parametrize("name", ["split-digits", "permuted-digits"])
def test_a_benchmark_is_a_sequence(name):
    benchmark = evcl.benchmarks.get(name, seed=4)
    assert len(benchmark) == 5
    assert [t.name for t in benchmark[1:3]] == [benchmark[1].name, benchmark[2].name]
    assert benchmark[1:3].name == name
    assert benchmark[-1] is list(benchmark)[4]
    assert benchmark.seed == 4
    with pytest.raises(IndexError):
        benchmark[5]


def test_the_digits_are_split_once_and_for_all():
    one, two = (evcl.benchmarks.get("split-digits", seed=s) for s in (0, 1))
    assert sum(len(t.train) for t in one) == 1400
    assert sum(len(t.test) for t in one) == 397
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a.train.x, b.train.x)
        assert not rows(a.train.x) & rows(a.test.x)
        assert 0 <= a.train.x.min() <= a.train.x.max() <= 1
        assert set(a.train.y.tolist()) == set(a.test.y.tolist()) == set(a.classes)


def test_permuted_tasks_share_the_data():
    benchmark = evcl.benchmarks.get("permuted-digits", seed=0, tasks=50)
    assert len({t.train.inputs.data_ptr() for t in benchmark}) == 1
    assert {t.head for t in benchmark} == {"permutation 0"}
    first, second = benchmark[0].train, benchmark[1].train
    assert not torch.equal(first.x, second.x)
    assert not torch.equal(first.x, first.inputs)
    assert torch.equal(first.x.sort(1).values, second.x.sort(1).values)
    assert torch.equal(benchmark[0].train.permutation, benchmark[0].test.permutation)


def test_permutations_are_a_function_of_the_seed():
    one, same, other = (evcl.benchmarks.get("permuted-digits", seed=s)[2].train.x for s in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("name", ["split-digits", "permuted-digits"])
def test_validation_is_taken_out_of_the_training_set(name):
    whole, cut = evcl.benchmarks.get(name), evcl.benchmarks.get(name, validation=0.1)
    for a, b in zip(whole, cut, strict=True):
        assert len(b.validation) == round(0.1 * len(a.train))
        assert len(b.train) + len(b.validation) == len(a.train)
        assert torch.equal(a.test.x, b.test.x)
        assert not rows(b.train.x) & rows(b.validation.x)
        assert b.held_out is b.validation
        assert a.held_out is a.test
        assert set(b.validation.y.tolist()) == set(a.train.y.tolist())


def test_stratified_parts_have_the_classes_in_proportion(generator):
    labels = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)
    kept, held = stratified(labels, 20, generator)
    assert labels[held].bincount().tolist() == [12, 6, 2]
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(100))
    with pytest.raises(evcl.EvclError, match="cannot hold out 100 of 100"):
        stratified(labels, 100, generator)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "split-digit"}, "unknown benchmark 'split-digit'; did you mean 'split-digits'?"),
        (
            {"name": "split-digits", "tasks": 6},
            "tasks of split-digits must be a whole number of at least 1 and at most 5",
        ),
        ({"name": "permuted-digits", "tasks": 0}, "at least 1"),
        ({"name": "permuted-digits", "seed": -1}, "seed must be"),
        ({"name": "permuted-digits", "validation": 1.0}, "validation must be"),
        ({"name": "permuted-digits", "validation": float("nan")}, "validation must be"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(evcl.EvclError) as error:
        evcl.benchmarks.get(**arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
