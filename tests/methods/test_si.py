"""Synaptic intelligence: by plain torch, step by step, and the faults that public code of it has."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from small_runs import EXAMPLES, F64, TASKS, assert_weights, copies, learned, logits, plain, run_of, task, used_by

from evcl.methods import Gradients, TaskData
from evcl.methods.measures import XI, PathIntegral
from evcl.nn import Gaussian, Layout, Part


def by_hand(run, c, xi):
    """The weights and Omega after the tasks, by plain torch. `xi`: Delta^2 of all weights -> xi."""
    network = plain(run)
    omega = {name: torch.zeros_like(w) for name, w in network.named_parameters()}
    for one in TASKS:
        used = used_by(network, one.head)
        anchor, path = copies(used), {name: torch.zeros_like(w) for name, w in used.items()}
        adam = torch.optim.Adam(used.values(), lr=0.02)
        for _ in range(4):
            loss = F.cross_entropy(logits(network, one.x[0], one.head), one.y[0])
            g = dict(zip(used, torch.autograd.grad(loss, list(used.values())), strict=True))
            before = copies(used)
            for name, w in used.items():
                w.grad = g[name] + 2 * c * omega[name] / one.n * (before[name] - anchor[name])
            adam.step()
            for name, w in used.items():
                path[name] -= g[name] * (w.detach() - before[name])  # the penalty is not in g
        moved = {name: (w.detach() - anchor[name]).square() for name, w in used.items()}
        damping = xi(torch.cat([m.flatten() for m in moved.values()]))
        for name in used:
            omega[name] = (omega[name] + one.n * path[name] / (moved[name] + damping)).clamp_min(0)
    return dict(network.named_parameters()), omega


@pytest.mark.parametrize("xi", [0.05, "auto"])
def test_it_is_what_plain_torch_makes_of_its_equations(xi):
    damping = (lambda moved: XI * moved[moved > 0].mean()) if xi == "auto" else lambda moved: xi
    weights, omega = by_hand(run_of("si"), 0.7, damping)
    run = learned("si", TASKS, strength=0.7, xi=xi)
    assert_weights(run, run.network.posterior.mean, weights)
    assert_weights(run, run.memory.importance, omega)
    assert float((run.memory.importance > 0).double().mean()) > 0.5


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


def test_importance_counts_rows_and_not_batches():
    """Twice the same rows: the path is the same, and Omega counts twice as many rows."""
    one = task(0, 0)
    twice = TaskData(one.x.repeat(1, 2, 1), one.y.repeat(1, 2), 0, task=0)
    once, double = (
        learned("si", [data], batch_size=rows, xi=0.1).memory.importance
        for data, rows in ((one, EXAMPLES), (twice, 2 * EXAMPLES))
    )
    torch.testing.assert_close(double, 2 * once)
