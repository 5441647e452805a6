"""Several methods in one run: each replica learns as it does alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import evcl
from evcl.errors import EvclError
from evcl.methods import METHODS, packing
from evcl.settings import resolve
from evcl.training import Run, TaskData

F64 = torch.float64
linear = nn.utils.skip_init
NETWORKS = {
    "chain": lambda: evcl.nn.mlp(5, [8]),
    "batch norm": lambda: nn.Sequential(linear(nn.Linear, 5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1)),
}
PROGRAMS = [
    ["evcl", "vcl"],
    ["naive", "ewc", "lwf"],
    ["vcl-random-coreset", "vcl-kcenter-coreset"],
    ["random-coreset", "kcenter-coreset"],
    ["vcl", "evcl", "vcl", "evcl"],
]


def tasks(shared):
    """Two tasks, whose examples all replicas share, or of which each has its own."""
    found = []
    for head in range(2):
        x = torch.randn(1 if shared else 4, 30, 5, generator=torch.Generator().manual_seed(head), dtype=F64)
        found.append(TaskData(x, (x[..., head] > 0).long(), head, task=head))
    return found


def trained(names, replicas, network, shared, **given):
    """Two rounds of these methods, as replicas of these numbers."""
    settings = []
    for name, r in zip(names, replicas, strict=True):
        known = METHODS[name].known_settings
        usual = {"epochs": 2, "batch_size": 8, "lr": 0.002 * (1 + r), "coreset_size": 6, "strength": 1.0 + r}
        settings.append(resolve(name, known, {k: v for k, v in {**usual, **given}.items() if k in known}))
    methods = [METHODS[name] for name in names]
    run = Run(NETWORKS[network](), methods, settings, [4 + r for r in replicas], draw=True, dtype=F64)
    for task in tasks(shared):
        run.add_head(8, 2)
        run.learn([task.replicas(replicas)])
    return run, [run.predict(task.replicas(replicas).x, task.head, task=task.task) for task in tasks(shared)]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("names", PROGRAMS, ids=" ".join)
def test_each_is_its_run_alone(names, network, shared):
    """Its posterior, what layers measured, what is remembered of it, and what it predicts."""
    close = {"rtol": 1e-9, "atol": 1e-9}
    run, predicted = trained(names, range(len(names)), network, shared)
    statistics = run.network.statistics()
    assert bool(statistics) == (network == "batch norm")
    for r, name in enumerate(names):
        alone, predicted_alone = trained([name], [r], network, shared)
        for found, wanted in zip(predicted, predicted_alone, strict=True):
            torch.testing.assert_close(found[r], wanted[0], **close)
        for part in ("mean", "log_std"):
            found, wanted = (getattr(one.network.posterior, part) for one in (run, alone))
            if wanted is not None:
                torch.testing.assert_close(found[r], wanted[0], **close)
        for key, wanted in alone.network.statistics().items():
            torch.testing.assert_close(statistics[key][r], wanted[0], **close)
        (k,) = (k for k, group in enumerate(run.groups) if r in group.rows)
        row = run.groups[k].rows.index(r)
        remembered, wanted = packing.tensors(run.memories[k]), packing.tensors(alone.memory)
        assert remembered.keys() == wanted.keys()
        for key, tensor in wanted.items():
            torch.testing.assert_close(remembered[key][row], tensor[0], **close)


def test_what_several_methods_remember_is_saved_and_loaded():
    names = ["vcl", "evcl", "vcl"]
    run, _ = trained(names, range(3), "batch norm", shared=True)
    tensors = {name: t.clone() for name, t in run.tensors().items()}
    other, _ = trained(names, range(3), "batch norm", shared=True)
    other.learn([tasks(True)[0]])
    other.load_tensors(tensors, run.outline(), run.rounds, run.seen)
    for one in (run, other):
        one.learn([tasks(True)[1]])
    ours, theirs = run.tensors(), other.tensors()
    assert ours.keys() == theirs.keys()
    assert {"memory 0/prior/mean", "memory 1/importance"} <= ours.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    "names", [["evcl", "ewc"], ["vcl", "vcl-random-coreset"], ["naive", "joint"], ["naive", "random-coreset"]]
)
def test_methods_of_different_kinds_are_refused(names):
    with pytest.raises(EvclError, match="are of different kinds and cannot share a program"):
        trained(names, range(2), "chain", shared=True)
