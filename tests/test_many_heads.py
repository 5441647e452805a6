"""Counts: a file of many heads is laid out once, and all heads share one pass through the trunk."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from attacks import with_heads
from calls import counted

import evcl
from evcl.methods import Round, TaskData
from evcl.methods.distillation import taught
from evcl.nn import bayesianize, head, mlp, outputs
from evcl.nn.passes import MIN_HEADS_TOGETHER
from evcl.targets import CATEGORICAL

HEADS = 1200


def test_a_file_of_many_heads_is_laid_out_once(tmp_path):
    """A file of 125 kB: where each head was added for itself, it took more than a minute."""
    made = {}
    for heads in (100, HEADS):
        path = with_heads(tmp_path / "m.safetensors", heads)
        evcl.load(path)
        with counted() as made[heads]:
            found = evcl.load(path)
        assert len(found.heads) == heads
    assert made[HEADS]["Layout.extending"] == made[HEADS]["BayesianNetwork.with_slots"] == 1
    assert made[HEADS].total() < HEADS / 100 * made[100].total()


@pytest.mark.parametrize("draws", [1, 5])
def test_heads_are_inferred_in_one_pass_a_draw(draws):
    learner = evcl.VCL(evcl.nn.mlp(4, [8]), epochs=1, predict_samples=draws)
    x = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    for _ in range(30):
        learner.learn(x, x[:, 0] > 0)
    passes = []
    learner.state.run.network.trunk.register_forward_hook(lambda module, inputs, output: passes.append(len(output)))
    found = learner.predictions(x, task="infer")
    assert passes.count(200) == draws
    assert len(passes) <= draws + 1  # one example, to see whether the network takes it
    assert len(set(found.tasks)) > 1
    for task in ("0", "29"):  # as each head says alone
        rows = found.tasks == task
        np.testing.assert_allclose(found.probabilities[rows], learner.predict_proba(x, task)[rows], atol=1e-6)


@pytest.mark.parametrize("method", ["naive", "ewc", "vcl"])
def test_a_task_touches_no_head_but_its_own(method):
    """So its time does not grow with the number of heads, but for a look at each one's name."""
    x = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    learner = evcl.Learner(evcl.nn.mlp(4, [8]), method, epochs=1)
    each = []
    for _ in range(12):
        with counted() as calls:
            learner.learn(x, x[:, 0] > 0)
        each.append(calls.total())
    assert each[-1] - each[2] < 10 * 9


def test_of_many_heads_some_are_distilled():
    learner = evcl.Learner(evcl.nn.mlp(2, [3]), "lwf", epochs=1)
    x, y = np.zeros((4, 2), np.float32), np.arange(4) % 2
    learner.learn(x, y)
    network, data = learner.state.run.network, TaskData(torch.zeros(1, 4, 2), torch.zeros(1, 4, dtype=torch.long), 0)

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
    sizes = [2] * (MIN_HEADS_TOGETHER + 1)
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
