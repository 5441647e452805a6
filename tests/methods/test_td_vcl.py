"""TD-VCL: its weights and its objective by definition, the posteriors that it keeps, and VCL as its simplest case."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from small_runs import F64, assert_springs, first_fit, learned, run_of

from evcl.methods import Mixed, TaskData


def data(k, n=40, heads=1):
    source = torch.Generator().manual_seed(k)
    x = torch.randn(1, n, 5, generator=source, dtype=F64)
    return TaskData(x, (x[:, :, k % 5] > 0).long(), k % heads, task=k)


made = partial(run_of, "td-vcl", hidden=(6,), usual={"epochs": 2, "batch_size": 10})


def test_after_n_tasks_its_n_anchors_are_the_n_posteriors():
    """Newest first, to the bit; then the oldest is dropped, and until then the first prior is the oldest."""
    run, posteriors = made(anchors=3), []
    prior = run.memory.prior.snapshot()
    for k in range(5):
        run.learn([data(k)])
        posteriors.insert(0, run.network.posterior.snapshot())
        found = (run.memory.prior, *run.memory.older)
        wanted = [*posteriors, prior][:3]
        assert len(found) == min(k + 2, 3)
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a.mean, b.mean)
            assert torch.equal(a.log_std, b.log_std)
        assert [task.task for task in run.memory.kept] == list(range(max(0, k - 1), k + 1))
    assert all((a.mean - b.mean).abs().max() > 1e-3 for a, b in pairwise(posteriors))


@pytest.mark.parametrize("decay", [0.4, 1.0])
def test_its_objective_is_that_of_the_definition(decay):
    """With all rows kept: the mean over batches of any losses, and the terms, are a multiple of N_t L_t."""
    run = made(anchors=3, anchor_decay=decay, memory=1000, tempering=0.2, batch_size=12)
    sizes = [30, 50, 40, 20]
    for k in range(3):
        run.learn([data(k, sizes[k])])
    fit = first_fit(run, [data(3, sizes[3])])
    w = [decay**k / sum(decay**j for j in range(3)) for k in range(3)]
    c = {3: 1.0, 2: w[1] + w[2], 1: w[2]}
    assert fit.sampler == Mixed(0.5, 1)
    assert [task.task for task in fit.data] == [3, 1, 2]
    source = torch.Generator().manual_seed(0)
    nll = [torch.rand(task.y.shape[1], generator=source, dtype=F64) for task in fit.data]  # a loss for every row
    new, *old = (
        one if task.weights is None else one * task.weights[0] for one, task in zip(nll, fit.data, strict=True)
    )
    batch = 0.5 * new.mean() + 0.5 * torch.cat(old).mean()
    wanted = sum(c[task.task] * one.sum() for one, task in zip(nll, fit.data, strict=True))
    torch.testing.assert_close(batch * sizes[3] / 0.5, wanted)
    q = run.network.posterior.map(lambda t: t + 0.1)
    anchors = (run.memory.prior, *run.memory.older)
    kls = sum(w_k * 0.2 * q.kl(anchor) for w_k, anchor in zip(w, anchors, strict=True))
    torch.testing.assert_close(sum(term.loss(q) for term in fit.terms) * sizes[3] / 0.5, kls)
    assert_springs(fit.terms, q)


@pytest.mark.parametrize("rows", [2, 8, 9, 30])
def test_a_task_smaller_than_a_batch_counts_as_much_as_its_rows(rows):
    """Half of every batch is new, also of the last one, which has fewer rows: the weights of kept rows rely on it."""
    run = made(memory=20)
    run.learn([data(0, 40)])
    fit = first_fit(run, [data(1, rows)])
    order = fit.sampler([rows, 20], 16, torch.Generator().manual_seed(0))
    assert [int((batch < rows).sum()) * 2 for batch in order.split(16)] == [len(batch) for batch in order.split(16)]


def test_kept_rows_stand_for_all_rows_of_their_task():
    run = made(memory=8)
    run.learn([data(0, 40)])
    (kept,) = run.memory.kept
    assert kept.weights.tolist() == [[5.0] * 8]
    rows = {tuple(row) for row in data(0, 40).x[0].tolist()}
    assert {tuple(row) for row in kept.x[0].tolist()} < rows
    assert len(set(map(tuple, kept.x[0].tolist()))) == 8


def test_anchors_of_another_beta_are_converted():
    """The precision that an anchor added to the first prior is in units of the beta that it was trained with."""
    run = made(anchors=2, tempering="auto", prior_std=1.0)
    for k in range(2):
        run.learn([data(k)])
    fit = first_fit(run, [data(2)])
    now = (fit.terms[0].weight + fit.terms[1].weight) * 40 / 0.5
    for term, anchor, before in zip(
        fit.terms, (run.memory.prior, *run.memory.older), (run.memory.beta, *run.memory.betas), strict=True
    ):
        used = before > 0
        added = ((-2 * anchor.log_std).exp() - 1).clamp_min(0) * before / now
        torch.testing.assert_close(((-2 * term.prior.log_std).exp() - 1)[used], added[used])
        assert not used[:, run.network.layout.spans["head 1.weight"]].any()
        assert used[:, run.network.layout.spans["1.weight"]].all()


def test_with_one_anchor_it_is_vcl_and_with_more_it_is_not():
    def ended(method, **given):
        return learned(method, map(data, range(3)), **made.keywords, **given).network.posterior

    vcl, naive = ended("vcl", tempering=0.05), ended("naive")
    assert torch.equal(ended("td-vcl", anchors=1, tempering=0.05).mean, vcl.mean)
    found = [
        ended("td-vcl", anchors=n, tempering=0.05, anchor_decay=decay).mean
        for n, decay in ((2, 0.5), (3, 0.5), (3, 1.0))
    ]
    for i, one in enumerate(found):
        for other in (*found[:i], vcl.mean, naive.mean):
            assert (one - other).abs().max() > 1e-3


def test_tasks_that_were_learned_jointly_are_of_one_age():
    run = made(anchors=2, memory=10)
    run.learn([data(0), data(1, heads=2)])
    fit = first_fit(run, [data(2), data(3, heads=2)])
    assert fit.sampler == Mixed(0.5, 2)
    assert [task.task for task in fit.data] == [2, 3, 0, 1]
    assert torch.equal(fit.data[2].weights, fit.data[3].weights)
    run.learn([data(2), data(3, heads=2)])
    assert [task.task for task in run.memory.kept] == [2, 3]
