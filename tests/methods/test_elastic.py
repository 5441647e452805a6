"""EWC, online and offline, synaptic intelligence and memory aware synapses: by plain torch, step by step."""

from __future__ import annotations

import pytest
import small_runs
import torch
import torch.nn.functional as F
from small_runs import F64, PLAIN, PLAIN_FISHER, TASKS, assert_springs, assert_weights, copies, learned, logits, plain

from evcl.methods import Elastic
from evcl.methods.ewc_offline import Anchors
from evcl.methods.measures import XI
from evcl.methods.terms import Spring
from evcl.nn import Gaussian

HALF = {"ewc": 0.5, "ewc-offline": 0.5, "si": 1.0, "mas": 1.0}  # of the squared distance


def sensitivities(used, outputs, x):
    """The sum over the rows of x of |d ||f(x)||^2 / d w|, by name: no labels are needed."""
    total = {name: torch.zeros_like(w) for name, w in used.items()}
    for row in x:
        grads = torch.autograd.grad(outputs(row).square().sum(), list(used.values()))
        for name, grad in zip(used, grads, strict=True):
            total[name] += grad.abs()
    return total


def path_integrals(used, start, path, xi, n):
    moved = {name: (w.detach() - start[name]).square() for name, w in used.items()}
    every = torch.cat([m.flatten() for m in moved.values()])
    damping = XI * every[every > 0].mean() if xi == "auto" else xi
    return {name: n * path[name] / (moved[name] + damping) for name in used}


def by_hand(method, strength, xi=None):
    """The weights after the tasks, and the anchors with their importance: of every task, or of all tasks together."""
    network, kept = plain(small_runs.run_of(method)), []
    weights = dict(network.named_parameters())
    for one in TASKS:
        used = small_runs.used_by(network, one.head)
        start, path = copies(used), {name: torch.zeros_like(w) for name, w in used.items()}
        adam = torch.optim.Adam(used.values(), lr=PLAIN["lr"])
        for _ in range(PLAIN["epochs"]):
            loss = F.cross_entropy(logits(network, one.x[0], one.head), one.y[0])
            g = dict(zip(used, torch.autograd.grad(loss, list(used.values())), strict=True))
            before = copies(used)
            for name, w in used.items():
                pulls = (f[name] / one.n * (before[name] - anchor[name]) for anchor, f in kept)
                w.grad = g[name] + 2 * HALF[method] * strength * sum(pulls)
            adam.step()
            for name, w in used.items():
                path[name] -= g[name] * (w.detach() - before[name])  # the penalty is not in g
        found = {
            "si": lambda: path_integrals(used, start, path, xi, one.n),  # noqa: B023
            "mas": lambda: sensitivities(used, lambda x: logits(network, x, one.head), one.x[0]),  # noqa: B023
        }.get(method, lambda: small_runs.fisher_by_definition(used, lambda x: logits(network, x, one.head), one.x[0]))()  # noqa: B023
        whole = {name: found.get(name, torch.zeros_like(w)) for name, w in weights.items()}
        if method != "ewc-offline" and kept:
            whole = {name: (kept[-1][1][name] + more).clamp_min(0) for name, more in whole.items()}
        one_more = copies(weights), {name: f.clamp_min(0) for name, f in whole.items()}
        kept = [*kept, one_more] if method == "ewc-offline" else [one_more]
    return weights, kept


@pytest.mark.parametrize(
    ("method", "strength", "given"),
    [
        ("ewc", 2.0, PLAIN_FISHER),
        ("ewc-offline", 2.0, PLAIN_FISHER),
        ("si", 0.7, {"xi": 0.05}),
        ("si", 0.7, {"xi": "auto"}),
        ("mas", 0.2, {}),
    ],
)
def test_it_is_what_plain_torch_makes_of_its_equations(method, strength, given):
    weights, kept = by_hand(method, strength, given.get("xi"))
    run = learned(method, TASKS, strength=strength, **given)
    assert_weights(run, run.network.posterior.mean, weights)
    offline = method == "ewc-offline"
    importance = run.memory.importance if offline else [run.memory.importance]
    for found, (_, wanted) in zip(importance, kept, strict=True):
        assert_weights(run, found, wanted)
    for found, (wanted, _) in zip(run.memory.anchors, kept, strict=True) if offline else ():
        assert_weights(run, found, wanted)
    assert float((importance[0] > 0).double().mean()) > 0.3


def test_the_anchors_are_one_spring_and_their_penalties_sum(generator):
    pairs = [
        (torch.rand(2, 9, generator=generator, dtype=F64), torch.randn(2, 9, generator=generator, dtype=F64))
        for _ in range(4)
    ]
    pairs[2][0][:, 3:] = 0  # a weight that a task did not use
    for w, _ in pairs:
        w[:, 8] = 0  # and one that none has used
    each = [Elastic(Gaussian(c, None), w) for w, c in pairs]
    whole = Anchors.of([Spring(w, c) for w, c in pairs])
    q = Gaussian(torch.randn(2, 9, generator=generator, dtype=F64), None)
    torch.testing.assert_close(whole.loss(q), sum(one.loss(q) for one in each))
    assert_springs([whole], q)
    pull = whole.springs().mean
    assert not (pull.w * (q.mean - pull.c))[:, 8].any()
