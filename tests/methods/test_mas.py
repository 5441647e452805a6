"""Memory aware synapses: by plain torch, example by example."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from small_runs import TASKS, assert_weights, logits, moved, plain, run_of, used_by

from evcl.methods import mas
from evcl.methods.importance import sensitivity


def by_hand(run, strength):
    """The weights and Omega after the tasks, by plain torch."""
    network = plain(run)
    weights = dict(network.named_parameters())
    omega = {name: torch.zeros_like(w) for name, w in weights.items()}
    for one in TASKS:
        used, n = used_by(network, one.head), one.y.shape[1]
        anchor = {name: w.detach().clone() for name, w in used.items()}
        adam = torch.optim.Adam(used.values(), lr=0.02)
        for _ in range(4):
            adam.zero_grad()
            penalty = sum((omega[name] / n * (w - anchor[name]).square()).sum() for name, w in used.items())
            (F.cross_entropy(logits(network, one.x[0], one.head), one.y[0]) + strength * penalty).backward()
            adam.step()
        for x in one.x[0]:
            norm = logits(network, x, one.head).square().sum()
            for name, grad in zip(used, torch.autograd.grad(norm, list(used.values())), strict=True):
                omega[name] += grad.abs()  # n times the mean over the n examples
    return {name: w.detach() for name, w in weights.items()}, omega


def test_it_is_what_plain_torch_makes_of_its_equations():
    run = run_of("mas", strength=0.2)
    weights, omega = by_hand(run, 0.2)
    for one in TASKS:
        run.learn([one])
    for flat, wanted in ((run.network.posterior.mean, weights), (run.memory.importance, omega)):
        assert_weights(run, flat, wanted)
    assert float((run.memory.importance > 0).double().mean()) > 0.5


def test_the_strength_changes_the_outcome():
    assert moved("naive") > 1.002 * moved("mas", strength=0.01) > 1.1 * moved("mas", strength=1.0) > 0


def test_importance_needs_no_labels(monkeypatch):
    """With other labels after training the importance is the same; with fewer examples it is another."""
    run, seen = run_of("mas"), []

    def spied(fitted, round_, examples):
        other = round_.of([replace(one, y=1 - one.y) for one in round_.tasks])
        seen.extend(sensitivity(fitted, each, count) for each, count in ((round_, 30), (other, 30), (round_, 10)))
        return seen[0]

    monkeypatch.setattr(mas, "sensitivity", spied)
    run.learn([TASKS[0]])
    assert torch.equal(seen[0], seen[1])
    assert not torch.allclose(seen[0], seen[2])


def test_importance_is_that_of_examples_and_not_of_batches():
    """The batch size of training does not enter: the weights being equal, so is the importance."""
    found = []
    for rows in (30, 7):
        run = run_of("mas", batch_size=rows, lr=1e-12)  # the weights stay as they are
        run.learn([TASKS[0]])
        found.append(run.memory.importance)
    torch.testing.assert_close(found[0], found[1])
    assert float(found[0].min()) >= 0
    assert float(found[0].max()) > 0
