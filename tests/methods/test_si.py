"""Synaptic intelligence: by plain torch, step by step, and the faults that public code of it has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from small_runs import F64, HIDDEN, INPUTS, TASKS, assert_weights, logits, plain, run_of, task, two_tasks, used_by

import evcl
from evcl._core.settings import resolve
from evcl.methods import METHODS, Gradients
from evcl.methods.importance import XI, PathIntegral
from evcl.nn import Gaussian, Layout, Part
from evcl.training import Run


def by_hand(run, c, xi):
    """The weights and Omega after the tasks, by plain torch. `xi`: (Delta^2 by name, total) -> xi."""
    network = plain(run)
    weights = dict(network.named_parameters())
    omega = {name: torch.zeros_like(w) for name, w in weights.items()}
    for one in TASKS:
        used, n = used_by(network, one.head), one.y.shape[1]
        anchor = {name: w.detach().clone() for name, w in used.items()}
        path = {name: torch.zeros_like(w) for name, w in used.items()}
        adam = torch.optim.Adam(used.values(), lr=0.02)
        for _ in range(4):
            loss = F.cross_entropy(logits(network, one.x[0], one.head), one.y[0])
            g = dict(zip(used, torch.autograd.grad(loss, list(used.values())), strict=True))
            before = {name: w.detach().clone() for name, w in used.items()}
            for name, w in used.items():
                w.grad = g[name] + 2 * c * omega[name] / n * (before[name] - anchor[name])
            adam.step()
            for name, w in used.items():
                path[name] -= g[name] * (w.detach() - before[name])  # the penalty is not in g
        moved = {name: (w.detach() - anchor[name]).square() for name, w in used.items()}
        damping = xi(torch.cat([m.flatten() for m in moved.values()]))
        for name in used:
            omega[name] = (omega[name] + n * path[name] / (moved[name] + damping)).clamp_min(0)
    return {name: w.detach() for name, w in weights.items()}, omega


@pytest.mark.parametrize("xi", [0.05, "auto"])
def test_it_is_what_plain_torch_makes_of_its_equations(xi):
    run = run_of("si", strength=0.7, xi=xi)
    weights, omega = by_hand(run, 0.7, lambda moved: XI * moved[moved > 0].mean() if xi == "auto" else xi)
    for one in TASKS:
        run.learn([one])
    for flat, wanted in ((run.network.posterior.mean, weights), (run.memory.importance, omega)):
        assert_weights(run, flat, wanted)
    assert float((run.memory.importance > 0).double().mean()) > 0.5


def test_the_strength_changes_the_outcome():
    ends = [two_tasks("naive"), *(two_tasks("si", strength=c) for c in (0.3, 3.0))]
    assert all(torch.equal(first, ends[0][0]) for first, _ in ends)  # no penalty on the first task
    far = [float((last - first).norm()) for first, last in ends]
    assert far[0] > 1.02 * far[1] > 1.02**2 * far[2] > 0


def test_the_tracker_keeps_copies_and_no_views():
    """A fault seen elsewhere: old and new weights were one tensor, and so the path was 0."""
    q = Gaussian(torch.ones(1, 3, dtype=F64), None)
    tracker = PathIntegral(0.5)
    layout = Layout({"w": (3,)})
    tracker.begin(q, Part(layout, layout))
    grads = Gradients(torch.tensor([[1.0, -2.0, 3.0]], dtype=F64), None, None)
    tracker.before(q, grads)
    grads.mean.add_(100)  # the penalty, which is added in place
    q.mean.add_(torch.tensor([[-0.1, 0.2, 0.3]], dtype=F64))
    tracker.after(q)
    wanted = torch.tensor([[0.1 / 0.51, 0.4 / 0.54, -0.9 / 0.59]], dtype=F64)
    torch.testing.assert_close(tracker.result(), wanted)


def test_the_anchor_is_not_the_live_weights():
    """The first task's weights are the anchor of the second, which trains others."""
    run = run_of("si", strength=5.0)
    run.learn([TASKS[0]])
    anchor, importance = run.network.posterior.mean, run.memory.importance
    before = anchor.clone(), importance.clone()
    run.learn([TASKS[2]])
    assert torch.equal(anchor, before[0])
    assert torch.equal(importance, before[1])
    assert not torch.equal(run.network.posterior.mean, anchor)


def test_a_replica_that_diverges_leaves_the_other_as_it_is():
    s = resolve("si", METHODS["si"].known_settings, {"epochs": 2, "batch_size": 10, "optimizer": "sgd"})
    found = []
    for seeds in ([0, 1], [1]):
        run = Run(
            evcl.nn.mlp(INPUTS, [HIDDEN]), METHODS["si"], [s] * len(seeds), seeds, draw=True, allow_divergence=True
        )
        run.add_heads(HIDDEN, [2])
        each = TASKS[0].x.float() * torch.tensor([1e30, 1.0])[seeds].view(-1, 1, 1)
        run.learn([replace(TASKS[0], x=each, y=TASKS[0].y.expand(len(seeds), -1))])
        found.append(run)
    assert found[0].diverged.tolist() == [True, False]
    for name, wanted in found[1].tensors().items():
        torch.testing.assert_close(found[0].tensors()[name][1:], wanted, rtol=1e-3, atol=1e-4)


def test_importance_counts_rows_and_not_batches():
    """Twice the same rows: the path is the same, and Omega counts twice as many rows."""
    twice = task(0, 0)
    twice = type(twice)(twice.x.repeat(1, 2, 1), twice.y.repeat(1, 2), 0, task=0)
    found = []
    for one, rows in ((task(0, 0), 30), (twice, 60)):
        run = run_of("si", batch_size=rows, xi=0.1)
        run.learn([one])
        found.append(run.memory.importance)
    torch.testing.assert_close(found[1], 2 * found[0])


@pytest.mark.parametrize("given", [{"xi": 0}, {"xi": "no"}, {"strength": -1}])
def test_bad_settings_are_refused(given):
    with pytest.raises(evcl.EvclError, match=next(iter(given))):
        evcl.Learner(evcl.nn.mlp(3, [3]), "si", **given)
