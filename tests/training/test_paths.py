"""Which of the engine's paths computes a round: its epochs say so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import evcl
from evcl.methods import Fit
from evcl.training import paths
from evcl.training.step import Execution

X = torch.rand(12, 3, 2, 2, generator=torch.Generator().manual_seed(0))
CASES = {
    "an mlp": ("chain", {}),
    "a sequence of linear layers and ReLUs": ("chain", {"between": nn.ReLU, "method": "ewc"}),
    "distillation": ("chain", {"method": "lwf"}),
    "scales and shifts of one task": ("chain", {"film": True}),
    "another nonlinearity": ("autograd", {"between": nn.Tanh}),
    "dropout": ("autograd", {"dropout": 0.1}),
    "images that are changed": ("autograd", {"augment": True}),
}


@pytest.mark.parametrize(("path", "given"), CASES.values(), ids=CASES)
def test_the_history_says_how_a_round_was_computed(path, given):
    given = {"method": "evcl", "epochs": 1, "batch_size": 6} | given
    between, dropout = given.pop("between", None), given.pop("dropout", 0.0)
    network = evcl.nn.mlp(12, [5], dropout=dropout)
    if between is not None:
        network = nn.Sequential(nn.Flatten(), network[1], between())
    learner = evcl.Learner(network, given.pop("method"), **given)
    for task in ("first", "second"):
        learner.learn(X, torch.arange(len(X)) % 2, task=task)
    assert {epoch.path for epochs in learner.history.values() for epoch in epochs} == {path}


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("kernels", {}),
        ("graph", {"chain": None}),
        ("graph", {"dtype": torch.float64}),
        ("graph", {"classes": 1000}),
        ("graph", {"weighted": True}),
        ("graph", {"task_weights": torch.zeros(1)}),
        ("graph", {"project": True}),
        ("graph", {"accumulate": 2}),
        ("graph", {"ranks": SimpleNamespace(capturable=True)}),
        ("autograd", {"ranks": SimpleNamespace(capturable=False)}),
        ("autograd", {"noise": object()}),
        ("autograd", {"capture": False}),
        ("autograd", {"capturable": False, "chain": None}),
        ("autograd", {"reread": True}),
    ],
)
def test_what_a_gpu_computes_how(path, given, monkeypatch):
    """Without one: graphs if everything can be captured, and kernels if these can do all of it."""
    monkeypatch.setattr(paths, "gpu_kernels", lambda: SimpleNamespace(MOST_CLASSES=128))
    like = SimpleNamespace(is_cuda=True, dtype=given.get("dtype", torch.float32), device=torch.device("cuda"))
    pool = SimpleNamespace(
        classes=given.get("classes", 2),
        weights=like if given.get("weighted") else None,
        likelihood=SimpleNamespace(compiled=True),
        augment=False,
        tasks=[0],
    )
    request = paths.Request(
        network=SimpleNamespace(task_weights=given.get("task_weights"), capturable=given.get("capturable", True)),
        weights=SimpleNamespace(mean=like),
        fit=Fit([], capture=given.get("capture", True), project=given.get("project", False)),
        pool=pool,
        how=Execution(given.get("ranks"), given.get("accumulate", 1), given.get("noise")),
        chain=given.get("chain", [("0.weight", "0.bias")]),
        reread=given.get("reread", False),
    )
    assert paths.chosen(request) == path
