"""What `evcl list methods` says of the methods: all are there, keep what it says, and have a measured cost."""

from __future__ import annotations

import json
import math
import runpy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from small_runs import INPUTS, by_sign, run_of
from torch import Tensor

from evcl._core.catalogue import EXAMPLE_NETWORK, METHOD_FACTS, METHOD_SUMMARIES, measured
from evcl.methods import METHODS
from evcl.methods.generative import Statistics
from evcl.methods.generator import Memory as GeneratorMemory
from evcl.methods.memories import hows, mapped
from evcl.methods.memory import Another, ByKey, KeptExamples, PerWeight

EXAMPLES, HIDDEN, TASKS = 400, [4, 5], 6


def test_every_method_has_its_facts_in_the_order_of_the_list():
    assert list(METHOD_FACTS) == list(METHOD_SUMMARIES)
    for name, facts in METHOD_FACTS.items():
        no_paper = name in ("naive", "joint", "evcl-film", "evcl-er", "kfac-evcl", "evcl-dgr")
        assert (1990 < facts.year < 2100) != no_paper


def tensors(value):
    found: list[Tensor] = []
    mapped(value, lambda tensor: (found.append(tensor), tensor)[1])
    return found


def fields(memory):
    """How each field is stored, and its value, in inner memories too."""
    for name, how in hows(memory).items():
        value = getattr(memory, name)
        if isinstance(memory, Statistics) and name == "classes":
            assert {t.shape[1] for t in tensors(value)} <= {2}  # one vector for each of the head's two classes
        elif not isinstance(memory, GeneratorMemory):
            yield from fields(value) if how is None else [(how, value)]


def numbers_per_weight(run):
    """Those that are not the plain weights: sigma, and what in the memory is no copy of the posterior."""
    q = run.network.posterior
    own = [t for t in (q.mean, q.log_std) if t is not None]
    kept = [t for how, value in fields(run.memory) if isinstance(how, PerWeight) for t in tensors(value)]
    assert all(t.shape == q.mean.shape for t in kept)
    return len(own) - 1 + sum(not any(torch.equal(t, one) for one in own) for t in kept)


def kept_by(name):
    """What a method keeps, counted when it has learned some tasks that share a head."""
    run = run_of(name, hidden=HIDDEN, heads=[2], usual={"epochs": 1, "batch_size": EXAMPLES})
    for k in range(TASKS):
        before = numbers_per_weight(run)
        run.learn([by_sign(k, examples=EXAMPLES)])
    found, per_weight = [], numbers_per_weight(run)
    if per_weight > before:
        found.append(f"{per_weight - before} per weight and task")
        assert TASKS * (per_weight - before) - per_weight in (0, 1)  # the newest may be the weights themselves
    elif per_weight:
        found.append(f"{per_weight} per weight")
    if METHODS[name].trunk is not None:
        return columns_of(run)
    found += [text for how, value in fields(run.memory) if (text := stored(how, value))]
    if any(isinstance(part, GeneratorMemory) for part in (run.memory, *vars(run.memory).values())):
        found.append("a VAE")
    if run.network.task_weights is not None:
        assert run.network.task_weights.table.shape == (1, TASKS, 2, sum(HIDDEN))
        found.append("2 per unit and task")
    return ", ".join(found) or "nothing"


def stored(how, value):
    """What a field of a memory keeps, apart from numbers per weight."""
    if isinstance(how, Another):
        return "a second network"
    if isinstance(how, KeptExamples) and sum(task.y.shape[1] for task in value) == 200:
        return "200 examples"
    if isinstance(how, KeptExamples):
        (each,) = {task.y.shape[1] for task in value}
        return f"{each} examples " + ("per task" if len(value) == TASKS else f"of {len(value)} tasks")
    return stored_by_key(how, value, tensors(value)) if isinstance(how, ByKey) else None


def stored_by_key(how, value, found):
    if how.key is str and "scatter" in value:
        return "class statistics"
    if how.key is str:
        return f"{len(found) / (1 + len(HIDDEN)):g} per layer" if value else None
    if value and all(t.shape[2:] == (sum(HIDDEN),) for t in found):
        return "1 per unit and class"
    if any(t.dim() == 3 for t in found):
        assert sum(t.shape[1] for t in found) == 200
        return "with outputs"
    if any(t.numel() > 2 for t in found):  # not the numbers of rows of the two classes
        assert all(t.numel() == INPUTS + sum(HIDDEN) for t in found)
        return f"{len(value) / TASKS:g} per unit and task"
    return None


def columns_of(run):
    """Counted: a copy of the network per task; and V, c, alpha and U into each layer but the first, and the head."""
    widths = [*HIDDEN, HIDDEN[-1]]  # the last lateral leads to the features
    own = (INPUTS + 1) * HIDDEN[0] + (HIDDEN[0] + 1) * HIDDEN[1]
    laterals = sum(k * a * a + 2 * a + a * b for k in range(1, TASKS) for a, b in pairwise(widths))
    outputs = 2 * (HIDDEN[-1] + 1)
    assert run.network.layout.size == TASKS * own + laterals + outputs
    assert [t.shape for t in run.memory.outputs.values()] == [(1, 2, HIDDEN[-1] + 1)] * TASKS
    return "a network per task, laterals between all of them"


@pytest.mark.parametrize("name", [name for name in METHOD_FACTS if not METHODS[name].jointly])
def test_a_method_keeps_what_the_table_says(name):
    assert kept_by(name) == METHOD_FACTS[name].keeps


def test_joint_training_needs_every_tasks_examples():
    assert [name for name in METHOD_FACTS if METHODS[name].jointly] == ["joint"]
    assert METHOD_FACTS["joint"].keeps == "all examples"


def test_every_method_has_a_measured_cost():
    networks, _ = measured()
    assert EXAMPLE_NETWORK in networks
    for network, costs in networks.items():
        assert list(costs) == list(METHOD_SUMMARIES), f"run python perf/methods.py NAME, for {network}"
        assert all(math.isfinite(cost[key]) and cost[key] >= 0 for cost in costs.values() for key in ("step", "task"))
        assert costs["naive"]["step"] == pytest.approx(1, abs=0.1)


@pytest.fixture
def program():
    return runpy.run_path(str(Path(__file__).parents[2] / "perf" / "methods.py"))


def test_the_measuring_program_times_the_end_of_a_task(program):
    """EWC makes a pass over the data there; SI and naive training do not."""
    network = program["Network"](20, [30], 10, own_heads=False)
    found = program["measure"](["naive", "si", "ewc"], network, rows=600, rounds=3)
    assert found["ewc"]["task"] > 2 * found["si"]["task"] > 0
    assert found["ewc"]["task"] > 2 * found["naive"]["task"]
    assert all(0.3 < cost["step"] < 3 for cost in found.values())


def test_fine_tuning_counts_as_often_as_there_are_epochs(program):
    network = program["Network"](5, [6], 2, own_heads=False)
    cost = program["second_task"]("vcl-random-coreset", network, 1000)()
    assert cost.besides > 5 * cost.epoch  # 400 of 1000 rows, 50 times


def test_a_method_measured_later_is_added(program, tmp_path):
    path, some = tmp_path / "costs.json", {"step": 1.0, "task": 0.5}
    program["write"](path, {"small": {"naive": some, "evcl": some}}, "here")
    program["write"](path, {"small": {"si": {"step": 2.0, "task": 0.0}}}, None)
    kept = json.loads(path.read_text("utf-8"))
    assert kept["where"] == "here"
    assert list(kept["costs"]["small"]) == ["evcl", "si", "naive"]
    assert "| `si` | 2.00 | 0.00 |" in program["table"](kept["costs"]).splitlines()
