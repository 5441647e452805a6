"""Counts: a file of many heads is laid out once, and all heads share one pass through the trunk."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import evcl
from evcl.nn import BayesianNetwork, Layout
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
    assert torch.equal(found._run.network.posterior.mean, wide["posterior.mean"])


@pytest.mark.parametrize("draws", [1, 5])
def test_heads_are_inferred_in_one_pass_a_draw(draws):
    learner = evcl.VCL(evcl.nn.mlp(4, [8]), epochs=1, predict_samples=draws)
    x = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    for _ in range(30):
        learner.learn(x, x[:, 0] > 0)
    passes = []
    learner._run.network.trunk.register_forward_hook(lambda module, inputs, output: passes.append(len(output)))
    found = learner.predictions(x, task="infer")
    assert passes.count(200) == draws
    assert len(passes) <= draws + 1  # one example, to see whether the network takes it
    assert len(set(found.tasks)) > 1
    for task in ("0", "29"):  # as each head says alone
        rows = found.tasks == task
        np.testing.assert_allclose(found.probabilities[rows], learner.predict_proba(x, task)[rows], atol=1e-6)
