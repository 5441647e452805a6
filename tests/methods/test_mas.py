"""Memory aware synapses: by plain torch, example by example."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from small_runs import TASKS, adam, assert_weights, copies, learned, logits, plain, run_of, used_by


def by_hand(run, strength):
    """The weights and Omega after the tasks, by plain torch."""
    network = plain(run)
    omega = {name: torch.zeros_like(w) for name, w in network.named_parameters()}
    for one in TASKS:
        used = used_by(network, one.head)
        anchor = copies(used)

        def loss(one=one, used=used, anchor=anchor):
            penalty = sum((omega[name] / one.n * (w - anchor[name]).square()).sum() for name, w in used.items())
            return F.cross_entropy(logits(network, one.x[0], one.head), one.y[0]) + strength * penalty

        adam(used, loss)
        for x in one.x[0]:
            norm = logits(network, x, one.head).square().sum()
            for name, grad in zip(used, torch.autograd.grad(norm, list(used.values())), strict=True):
                omega[name] += grad.abs()  # n times the mean over the n examples
    return dict(network.named_parameters()), omega


def test_it_is_what_plain_torch_makes_of_its_equations():
    """So the importance needs no labels."""
    weights, omega = by_hand(run_of("mas"), 0.2)
    run = learned("mas", TASKS, strength=0.2)
    assert_weights(run, run.network.posterior.mean, weights)
    assert_weights(run, run.memory.importance, omega)
    assert float((run.memory.importance > 0).double().mean()) > 0.5
