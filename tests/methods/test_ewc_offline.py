"""Offline EWC: an anchor and a Fisher per task, by plain torch; one spring, however many tasks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from small_runs import F64, TASKS, assert_weights, logits, moved, plain, run_of, used_by

from evcl.methods import Elastic, Round, autograd_gradients, collapse
from evcl.methods.ewc_offline import Anchors
from evcl.methods.terms import Spring
from evcl.nn import Gaussian

GIVEN = {"fisher_temperature": 1.0, "fisher_spread": 0.0}


def by_hand(run, strength):
    """The weights, and the anchors and Fishers of the tasks, by plain torch."""
    network = plain(run)
    weights, kept = dict(network.named_parameters()), []
    for one in TASKS:
        used, n = used_by(network, one.head), one.y.shape[1]
        adam = torch.optim.Adam(used.values(), lr=0.02)
        for _ in range(4):
            adam.zero_grad()
            penalty = torch.zeros((), dtype=F64)
            for anchor, fisher in kept:
                penalty = penalty + sum(
                    (fisher[name] / n * (w - anchor[name]).square()).sum() for name, w in used.items()
                )
            (F.cross_entropy(logits(network, one.x[0], one.head), one.y[0]) + strength / 2 * penalty).backward()
            adam.step()
        fisher = {name: torch.zeros_like(w) for name, w in weights.items()}
        for x in one.x[0]:
            log_p = logits(network, x, one.head).log_softmax(0)
            for c in range(2):
                grads = torch.autograd.grad(log_p[c], list(used.values()), retain_graph=True)
                for name, grad in zip(used, grads, strict=True):
                    fisher[name] += log_p[c].detach().exp() * grad.square()
        kept.append(({name: w.detach().clone() for name, w in weights.items()}, fisher))
    return weights, kept


def test_it_is_what_plain_torch_makes_of_its_equations():
    run = run_of("ewc-offline", strength=2.0, **GIVEN)
    weights, kept = by_hand(run, 2.0)
    for one in TASKS:
        run.learn([one])
    assert_weights(run, run.network.posterior.mean, weights)
    for k, (anchor, fisher) in enumerate(kept):
        for flat, wanted in ((run.memory.anchors[k], anchor), (run.memory.importance[k], fisher)):
            assert_weights(run, flat, wanted)


def test_the_n_anchors_after_n_tasks_are_the_n_posteriors():
    run, ends = run_of("ewc-offline", replicas=2, strength=2.0), []
    for k, one in enumerate(TASKS):
        run.learn([one])
        ends.append(run.network.posterior.mean.clone())
        assert len(run.memory.anchors) == len(run.memory.importance) == k + 1
        for anchor, end in zip(run.memory.anchors, ends, strict=True):
            assert torch.equal(anchor, end)
    assert not torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[1], ends[2])


def test_no_anchor_is_the_live_weights():
    run = run_of("ewc-offline")
    run.learn([TASKS[0]])
    (anchor,) = run.memory.anchors
    before = anchor.clone()
    run.network.posterior.mean.add_(1.0)
    assert torch.equal(anchor, before)


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
    pull, rest = collapse([whole])
    assert rest == []
    gradient = pull.mean.w * (q.mean - pull.mean.c)
    torch.testing.assert_close(gradient, autograd_gradients(each, q)[0])
    assert not gradient[:, 8].any()


def test_a_fit_has_one_spring_however_many_tasks():
    run = run_of("ewc-offline")
    for k, one in enumerate(TASKS):
        network = run.network
        round_ = Round(k, [one], network, network.posterior, run.seen, run.seeds, run.likelihood)
        (term,) = next(run.method.learn(run.memory, round_, run.settings)).terms
        pull, rest = collapse([term])
        assert (rest, pull.linear, pull.square) == ([], None, None)
        assert bool(pull.mean.w.any()) == (k > 0)
        run.learn([one])


def test_the_strength_changes_the_outcome():
    weak, strong = (moved("ewc-offline", strength=c) for c in (0.3, 30.0))
    assert moved("naive") > 1.002 * weak > 1.1 * strong > 0


def test_with_one_earlier_task_it_is_online_ewc():
    ends = []
    for method in ("ewc", "ewc-offline"):
        run = run_of(method, strength=2.0)
        for one in TASKS[:2]:
            run.learn([one])
        ends.append(run.network.posterior.mean.clone())
        run.learn([TASKS[2]])
        ends.append(run.network.posterior.mean)
    torch.testing.assert_close(ends[0], ends[2], rtol=1e-9, atol=1e-12)
    assert not torch.allclose(ends[1], ends[3], rtol=1e-4)
