"""The three scenarios: what a prediction is told of the task, and what it must tell."""

from __future__ import annotations

import numpy as np
import pytest

from evcl import EvclError
from evcl.benchmarks import SCENARIOS, from_arrays, get, split
from evcl.experiments import configure, execute, open_folder, write_result
from evcl.experiments.parallel import programs
from evcl.report.runs import command

SHORT = {"epochs": 2}


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
    with pytest.raises(EvclError, match="scenario must be one of task, domain, class, not 'all'"):
        get("split-digits", scenario="all")
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
    configs = {
        scenario: configure("split-digits", "naive", "default", [0], 2, {**SHORT, "scenario": scenario})
        for scenario in SCENARIOS
    }
    results = {scenario: execute(config) for scenario, config in configs.items()}
    for scenario, result in results.items():
        assert result.config["scenario"] == scenario
        assert f"--scenario {scenario}" in command(result)
    plain = configure("split-digits", "naive", "default", [0], 2, SHORT)
    own = execute(plain)
    assert "scenario" not in own.config
    assert own.accuracy == results["task"].accuracy
    write_result(tmp_path, results["class"])
    assert open_folder(tmp_path, configs["class"]) is not None
    with pytest.raises(EvclError, match="another run"):
        open_folder(tmp_path, plain)
    assert programs([plain, *configs.values()], 8) == [[0], [1], [2], [3]]


def test_a_scenario_that_is_none_is_refused_before_any_work():
    with pytest.raises(EvclError, match="scenario must be one of task, domain, class, not 'both'"):
        configure("split-digits", "naive", given={"scenario": "both"})
