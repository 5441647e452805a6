from __future__ import annotations

import numpy as np
import pytest
import torch

from evcl import EvclError
from evcl.benchmarks import SCENARIOS, from_arrays, get, split, stratified
from evcl.experiments import configure, execute, open_folder, write_result
from evcl.experiments.parallel import programs
from evcl.report.runs import command

PLAIN = ("split-digits", "naive", "default")


def rows(x):
    return {tuple(r) for r in x.flatten(1).tolist()}


@pytest.mark.parametrize("name", ["split-digits", "permuted-digits"])
def test_a_benchmark_is_a_sequence(name):
    benchmark = get(name, seed=4)
    assert len(benchmark) == 5
    assert [t.name for t in benchmark[1:3]] == [benchmark[1].name, benchmark[2].name]
    assert benchmark[1:3].name == name
    assert benchmark[-1] is list(benchmark)[4]
    assert benchmark.seed == 4
    with pytest.raises(IndexError):
        benchmark[5]


def test_the_digits_are_split_once_and_for_all():
    one, two = (get("split-digits", seed=s) for s in (0, 1))
    assert sum(len(t.train) for t in one) == 1400
    assert sum(len(t.test) for t in one) == 397
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a.train.x, b.train.x)
        assert not rows(a.train.x) & rows(a.test.x)
        assert 0 <= a.train.x.min() <= a.train.x.max() <= 1
        assert set(a.train.y.tolist()) == set(a.test.y.tolist()) == set(a.classes)


def test_permuted_tasks_share_the_data():
    benchmark = get("permuted-digits", seed=0, tasks=50)
    assert len({t.train.inputs.data_ptr() for t in benchmark}) == 1
    assert {t.head for t in benchmark} == {"permutation 0"}
    first, second = benchmark[0].train, benchmark[1].train
    assert not torch.equal(first.x, second.x)
    assert not torch.equal(first.x, first.inputs)
    assert torch.equal(first.x.sort(1).values, second.x.sort(1).values)
    assert torch.equal(benchmark[0].train.permutation, benchmark[0].test.permutation)


def test_permutations_are_a_function_of_the_seed():
    one, same, other = (get("permuted-digits", seed=s)[2].train.x for s in (0, 0, 1))
    assert (torch.equal(one, same), torch.equal(one, other)) == (True, False)


@pytest.mark.parametrize("name", ["split-digits", "permuted-digits"])
def test_validation_is_taken_out_of_the_training_set(name):
    whole, cut = get(name), get(name, validation=0.1)
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
    with pytest.raises(EvclError, match="cannot hold out 100 of 100"):
        stratified(labels, 100, generator)


# --- the three scenarios: what a prediction is told of the task, and what it must tell -----------------------------


def labels(part):
    return sorted(set(part.y.tolist()))


def test_task_is_the_split_benchmarks_own():
    own, asked = get("split-digits"), get("split-digits", scenario="task")
    assert [(t.name, t.head, t.classes) for t in own] == [(t.name, t.head, t.classes) for t in asked]


def test_domain_has_one_head_with_the_same_outputs():
    plain = get("split-digits", validation=0.2)
    stream = plain.in_scenario("domain")
    assert {(t.head, t.classes) for t in stream} == {("0/1", (0, 1))}
    for before, task in zip(plain, stream, strict=True):
        assert task.name == before.name
        for part, same in ((task.train, before.train), (task.test, before.test), (task.validation, before.validation)):
            assert labels(part) == [0, 1]
            assert part.inputs is same.inputs  # no copy
            assert [before.classes[y] for y in part.y.tolist()] == same.y.tolist()


def test_class_has_one_head_that_grows():
    stream = get("split-digits", scenario="class")
    assert {t.head for t in stream} == {"0/1"}
    assert [t.classes for t in stream] == [tuple(range(2 * k + 2)) for k in range(5)]
    assert [labels(t.train) for t in stream] == [[2 * k, 2 * k + 1] for k in range(5)]
    other = get("split-digits", classes=[[7, 3], [1, 9]], scenario="class")
    assert [t.classes for t in other] == [(7, 3), (7, 3, 1, 9)]  # in the order in which they came


def test_what_a_scenario_cannot_be_is_refused():
    for make in (lambda: get("split-digits", scenario="all"), lambda: configure(*PLAIN, given={"scenario": "all"})):
        with pytest.raises(EvclError, match="scenario must be one of task, domain, class, not 'all'"):
            make()
    with pytest.raises(EvclError, match="every task has the same classes"):
        get("permuted-digits", scenario="class")
    with pytest.raises(EvclError, match=r"the same number of classes, but they have \[2, 3\]"):
        get("split-digits", classes=[[0, 1], [2, 3, 4]], scenario="domain")


def test_permuted_tasks_are_a_domain_stream_and_may_have_heads_of_their_own():
    own, domain = get("permuted-digits", tasks=2), get("permuted-digits", tasks=2, scenario="domain")
    assert [(t.name, t.head, t.classes) for t in own] == [(t.name, t.head, t.classes) for t in domain]
    assert [t.head for t in get("permuted-digits", tasks=2, scenario="task")] == ["permutation 0", "permutation 1"]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_streams_of_your_own_have_scenarios_too(scenario):
    x, y = np.random.default_rng(0).normal(size=(80, 3)).astype("float32"), np.arange(80) % 4
    parts = [(x[y // 2 == k], y[y // 2 == k]) * 2 for k in range(2)]
    for stream in (split(x, y, [[0, 1], [2, 3]], test=0.25), from_arrays(parts)):
        found = stream.in_scenario(scenario)
        assert len({t.head for t in found}) == (2 if scenario == "task" else 1)
        assert found[1].classes == {"task": (2, 3), "domain": (0, 1), "class": (0, 1, 2, 3)}[scenario]


@pytest.mark.parametrize("method", ["naive", "joint"])
def test_in_class_predictions_are_among_all_classes_so_far(method):
    """Plain training predicts the last task's classes alone; training on everything tells all ten apart."""
    config = configure("split-digits", method, "default", [0], 3, {"epochs": 20, "scenario": "class"})
    result = execute(config)
    last = result.accuracy[0][-1][:3]
    if method == "joint":
        assert min(last) > 0.9
    if method == "naive":
        assert last[-1] > 0.9
        assert max(last[:2]) < 0.1


def test_a_result_says_its_scenario_and_how_to_make_it_again(tmp_path):
    configs = {scenario: configure(*PLAIN, [0], 2, {"epochs": 2, "scenario": scenario}) for scenario in SCENARIOS}
    results = {scenario: execute(config) for scenario, config in configs.items()}
    for scenario, result in results.items():
        assert result.config["scenario"] == scenario
        assert f"--scenario {scenario}" in command(result)
    plain = configure(*PLAIN, [0], 2, {"epochs": 2})
    own = execute(plain)
    assert "scenario" not in own.config
    assert own.accuracy == results["task"].accuracy
    write_result(tmp_path, results["class"])
    assert open_folder(tmp_path, configs["class"]) is not None
    with pytest.raises(EvclError, match="another run"):
        open_folder(tmp_path, plain)
    assert programs([plain, *configs.values()], 8) == [[0], [1], [2], [3]]
