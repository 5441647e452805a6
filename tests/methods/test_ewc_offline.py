"""Offline EWC: an anchor and a Fisher per task, by plain torch; one spring, however many tasks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from small_runs import (
    F64,
    PLAIN_FISHER,
    TASKS,
    adam,
    assert_springs,
    assert_weights,
    copies,
    first_fit,
    fisher_by_definition,
    learned,
    logits,
    plain,
    run_of,
    used_by,
)

from evcl.methods import Elastic, collapse
from evcl.methods.ewc_offline import Anchors
from evcl.methods.terms import Spring
from evcl.nn import Gaussian


def by_hand(run, strength):
    """The weights, and the anchors and Fishers of the tasks, by plain torch."""
    network, kept = plain(run), []
    weights = dict(network.named_parameters())
    for one in TASKS:
        used = used_by(network, one.head)

        def loss(one=one, used=used):
            penalty = sum(
                ((fisher[name] / one.n * (w - anchor[name]).square()).sum() for anchor, fisher in kept for name, w in
                used.items()), torch.zeros((), dtype=F64)
            )  # fmt: skip
            return F.cross_entropy(logits(network, one.x[0], one.head), one.y[0]) + strength / 2 * penalty

        adam(used, loss)
        own = fisher_by_definition(used, lambda x, head=one.head: logits(network, x, head), one.x[0])
        kept.append((copies(weights), {name: own.get(name, torch.zeros_like(w)) for name, w in weights.items()}))
    return weights, kept


def test_it_is_what_plain_torch_makes_of_its_equations():
    weights, kept = by_hand(run_of("ewc-offline"), 2.0)
    run = learned("ewc-offline", TASKS, strength=2.0, **PLAIN_FISHER)
    assert_weights(run, run.network.posterior.mean, weights)
    for k, (anchor, fisher) in enumerate(kept):
        assert_weights(run, run.memory.anchors[k], anchor)
        assert_weights(run, run.memory.importance[k], fisher)


def test_the_n_anchors_after_n_tasks_are_the_n_posteriors_and_one_spring():
    run, ends = run_of("ewc-offline", replicas=2, strength=2.0), []
    for k, one in enumerate(TASKS):
        (term,) = first_fit(run, [one]).terms
        pull, rest = collapse([term])
        assert (rest, pull.linear, pull.square) == ([], None, None)
        assert bool(pull.mean.w.any()) == (k > 0)
        run.learn([one])
        ends.append(run.network.posterior.mean.clone())
        assert len(run.memory.anchors) == len(run.memory.importance) == k + 1
        assert all(torch.equal(anchor, end) for anchor, end in zip(run.memory.anchors, ends, strict=True))
    assert not torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[1], ends[2])


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
    pull, _ = collapse([whole])
    assert not (pull.mean.w * (q.mean - pull.mean.c))[:, 8].any()


def test_with_one_earlier_task_it_is_online_ewc():
    second, third = (
        [learned(method, TASKS[:n], strength=2.0).network.posterior.mean for method in ("ewc", "ewc-offline")]
        for n in (2, 3)
    )
    torch.testing.assert_close(*second, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(*third, rtol=1e-4)
