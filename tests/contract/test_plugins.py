"""The plugins of tests/plugins do what their equations say: by hand, or by plain torch, in float64."""

from __future__ import annotations

import sys

import pytest
import small
import torch

import evcl
from evcl.methods import METHODS
from evcl.training import Run

F64 = torch.float64


def plugin(name):
    """The module of a plugin, as EVCL_PLUGINS loaded it."""
    return sys.modules[METHODS[name].learn.__module__]


def run_of(method, replicas=1, **given):
    whole = {"batch_size": small.EXAMPLES, "lr_schedule": "constant", "lr": 0.02, "epochs": 4}
    settings = small.settings(method, **{**whole, **given})
    network = evcl.nn.mlp(small.INPUTS, [7])
    run = Run(network, METHODS[method], [settings] * replicas, range(replicas), draw=True, dtype=F64)
    run.add_heads(7, [2, 2])
    return run, small.tasks(range(replicas), run.network.posterior.mean)


def test_replay_keeps_as_many_examples_of_each_task():
    run, tasks = run_of("plugin-er", replicas=2, memory=10)
    for k, count in enumerate((10, 5, 3)):
        run.learn([tasks[k]])
        assert [kept.y.shape for kept in run.memory.kept] == [(2, count)] * (k + 1)
    for kept, task in zip(run.memory.kept, tasks, strict=True):
        assert (kept.head, kept.task) == (task.head, task.task)
        for r in range(2):  # each is an example of its task, with its label
            same = (kept.x[r].unsqueeze(1) == task.x[r % len(task.x)]).all(2)
            assert torch.equal(same.sum(1), torch.ones(3, dtype=torch.long))
            assert torch.equal(kept.y[r], task.y[r % len(task.y)][same.int().argmax(1)])
    assert not torch.equal(run.memory.kept[0].x[0], run.memory.kept[0].x[1])


def test_the_active_column_learns_and_the_base_comes_to_say_the_same():
    run, tasks = run_of("plugin-two-networks", epochs=150)
    first = run.network.posterior.mean.clone()
    run.learn([tasks[0]])
    active = run.memory.active
    assert not torch.equal(run.network.posterior.mean, first)
    assert float((active.posterior.mean - run.network.posterior.mean).abs().max()) > 0.1  # another network
    said = evcl.nn.outputs(active.network, active.posterior.mean, active.network.layout, tasks[0].x, [0]).softmax(2)
    assert (said.argmax(2) == tasks[0].y).double().mean() > 0.95
    taught = run.predict(tasks[0].x, 0)
    assert float((taught - said).abs().mean()) < 0.05


@pytest.mark.parametrize("keep", [0.5, 0.9])
def test_masks_forget_nothing(keep):
    run, tasks = run_of("plugin-masks", replicas=2, keep=keep, epochs=20)
    said = []
    for task in tasks:
        run.learn([task])
        said.append(run.predict(task.x, task.head, task=task.task))
    for task, before in zip(tasks, said, strict=True):
        assert torch.equal(run.predict(task.x, task.head, task=task.task), before)
    masks = run.memory.masks
    assert list(masks) == [0, 1, 2]
    assert not torch.equal(masks[0][0], masks[0][1])  # a replica has its own
    units = run.network.layout.view(masks[0], "1.bias")
    wanted = units.unsqueeze(2).expand(-1, -1, small.INPUTS)
    assert torch.equal(run.network.layout.view(masks[0], "1.weight"), wanted)
    assert torch.equal(run.network.layout.view(masks[0], "head 0.weight"), units.unsqueeze(1).expand(-1, 2, -1))
    assert not run.network.layout.view(masks[0], "head 1.weight").any()


def test_a_task_that_is_inferred_is_predicted_by_its_own_masks():
    learner = evcl.Learner(evcl.nn.mlp(small.INPUTS, [7]), "plugin-masks", epochs=20, lr=0.02)
    tasks = small.tasks([0], torch.zeros(1))
    for name, task in zip("ab", tasks, strict=False):
        learner.learn((task.x[0] + 3 * task.task, task.y[0]), name)
    x = torch.cat([task.x[0] + 3 * task.task for task in tasks[:2]])
    found = learner.predictions(x, task="infer")
    chosen = list(found.tasks)
    assert set(chosen) == {"a", "b"}
    for name in "ab":
        rows = torch.tensor([one == name for one in chosen])
        own = learner.predictions(x, task=name)
        torch.testing.assert_close(found.entropy[rows], own.entropy[rows])
        assert (found.labels[rows] == own.labels[rows]).all()
