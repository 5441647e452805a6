"""Counts: a file of many heads is laid out once, and all heads share one pass through the trunk."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import evcl
from evcl.methods import Round, TaskData
from evcl.methods.teacher import taught
from evcl.nn import BayesianNetwork, Layout, bayesianize, head, mlp, outputs
from evcl.nn.passes import MANY
from evcl.targets import CATEGORICAL
from evcl.training import Run

HEADS = 1200


def counted(monkeypatch, *places):
    """How often each of these is called."""
    calls = Counter()

    def count(owner, name):
        original = getattr(owner, name)

        def called(*args, **options):
            calls[f"{owner.__name__}.{name}"] += 1
            return original(*args, **options)

        monkeypatch.setattr(owner, name, called)

    for owner, name in places:
        count(owner, name)
    return calls


@pytest.mark.parametrize("method", ["naive", "evcl"])
def test_a_file_of_many_heads_is_laid_out_once(method, tmp_path, monkeypatch):
    """A file of 125 kB: where each head was added for itself, it took more than a minute."""
    learner = evcl.Learner(evcl.nn.mlp(1, [1]), method, epochs=1)
    learner.learn(np.array([[0.0], [1.0]], "f"), np.array([0, 1]))
    description, tensors = learner.described()
    names = [str(i) for i in range(HEADS)]
    description |= {"heads": [[name, [0, 1]] for name in names], "tasks": [[name, name] for name in names]}
    description |= {"rounds": HEADS}
    weights = 2 + 4 * HEADS
    wide = {name: torch.full((1, weights), float(name == "memory/used")) for name in tensors}
    wide |= {name: tensor for name, tensor in tensors.items() if name.startswith("density.")}
    save_file(wide, tmp_path / "m.safetensors", {"evcl": json.dumps(description)})
    made = counted(monkeypatch, (Run, "_grow"), (BayesianNetwork, "with_slots"), (Layout, "extending"))
    found = evcl.load(tmp_path / "m.safetensors")
    assert (made["Run._grow"], made["BayesianNetwork.with_slots"]) == (1, 1)
    assert made["Layout.extending"] == 1
    assert len(found.heads) == HEADS
    assert torch.equal(found.parts.run.network.posterior.mean, wide["posterior.mean"])


@pytest.mark.parametrize("draws", [1, 5])
def test_heads_are_inferred_in_one_pass_a_draw(draws):
    learner = evcl.VCL(evcl.nn.mlp(4, [8]), epochs=1, predict_samples=draws)
    x = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    for _ in range(30):
        learner.learn(x, x[:, 0] > 0)
    passes = []
    learner.parts.run.network.trunk.register_forward_hook(lambda module, inputs, output: passes.append(len(output)))
    found = learner.predictions(x, task="infer")
    assert passes.count(200) == draws
    assert len(passes) <= draws + 1  # one example, to see whether the network takes it
    assert len(set(found.tasks)) > 1
    for task in ("0", "29"):  # as each head says alone
        rows = found.tasks == task
        np.testing.assert_allclose(found.probabilities[rows], learner.predict_proba(x, task)[rows], atol=1e-6)


@pytest.mark.parametrize("method", ["naive", "ewc", "vcl"])
def test_a_task_touches_no_head_but_its_own(method, monkeypatch):
    """So its time does not grow with the number of heads."""
    x = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    learner = evcl.Learner(evcl.nn.mlp(4, [8]), method, epochs=1)
    made = counted(monkeypatch, (Layout, "view"), (torch.nn.Module, "named_modules"))
    each = []
    for _ in range(12):
        made.clear()
        learner.learn(x, x[:, 0] > 0)
        each.append(dict(made))
    assert each[2] == each[-1]


def test_of_many_heads_some_are_distilled():
    learner = evcl.Learner(evcl.nn.mlp(2, [3]), "lwf", epochs=1)
    x, y = np.zeros((4, 2), np.float32), np.arange(4) % 2
    learner.learn(x, y)
    network, data = learner.parts.run.network, TaskData(torch.zeros(1, 4, 2), torch.zeros(1, 4, dtype=torch.long), 0)

    def asked(heads, number=7, seeds=(0,)):
        posterior = network.posterior
        return taught([data], Round(number, [data], network, posterior, range(heads), seeds, CATEGORICAL))

    assert asked(51) == dict.fromkeys(range(1, 51), 1.0)
    found = asked(101)
    assert len(found) == 50
    assert set(found.values()) == {2.0}  # each stands for two
    assert found == asked(101, seeds=(5,)) != asked(101, number=8)
    drawn = Counter(k for number in range(200) for k in asked(101, number))
    assert set(drawn) == set(range(1, 101))
    assert 60 < min(drawn.values()) < max(drawn.values()) < 140  # about 100 times each


@pytest.mark.parametrize("change", ["none", "another order", "another shape"])
def test_many_heads_in_one_product_are_each_alone(change, generator):
    """Heads of one shape, one after another, are one matrix product."""
    network = bayesianize(mlp(3, [5]), replicas=2, dtype=torch.float64)
    sizes = [2] * (MANY + 1)
    if change == "another shape":
        sizes[7] = 3
    layout = network.layout
    for size in sizes:
        k = network.add_head()
        network.layout = layout = network.with_slots([head(k, size, 5)])
    weights = torch.randn(2, layout.size, generator=generator, dtype=torch.float64)
    heads = list(range(len(sizes)))
    if change == "another order":
        heads = heads[::-1]
    x = torch.randn(1, 4, 3, generator=generator, dtype=torch.float64)
    found = outputs(network, weights, layout, x, heads)
    alone = torch.cat([outputs(network, weights, layout, x, [k]) for k in heads], 2)
    torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-12)
