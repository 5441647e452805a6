"""In which order a fit sees its examples, and whose they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_runs import F64, fitting, run_of

import evcl
from evcl.methods import METHODS, Mixed, TaskData, shuffled
from evcl.training import Pool


@given(
    new=st.integers(1, 60),
    kept=st.lists(st.integers(0, 9), max_size=3),
    batch=st.integers(1, 20),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_every_batch_has_its_share_and_every_new_example_is_seen_once(new, kept, batch, share, seed):
    order = Mixed(share)([new, *kept], batch, torch.Generator().manual_seed(seed))
    old = min(round(share * batch), batch - 1) if sum(kept) else 0
    batches = order.split(batch)
    for rows in batches[:-1]:
        assert len(rows) == batch
        assert int((rows >= new).sum()) == old
    fraction = old / batch  # of the last batch too, which may have fewer: to the nearest example
    assert abs(int((batches[-1] >= new).sum()) * (1 - fraction) - fraction * int((batches[-1] < new).sum())) <= 0.5
    assert sorted(order[order < new].tolist()) == list(range(new))
    assert order.max() < new + sum(kept)


def test_kept_examples_are_drawn_from_all_of_them():
    order = Mixed(0.5)([1000, 3, 4], 10, torch.Generator().manual_seed(0))
    counts = order[order >= 1000].bincount()[1000:]
    assert len(counts) == 7
    assert counts.min() > 0.5 * counts.max()


def tasks(source, dtype=F64):
    """One that all replicas share, and two that each has of its own, of other sizes; the last has weights."""
    found = []
    for head, (u, n) in enumerate(((1, 20), (3, 7), (3, 5))):
        x = torch.randn(u, n, 4, generator=source, dtype=dtype)
        weights = torch.rand(u, n, generator=source, dtype=dtype) if head == 2 else None
        found.append(TaskData(x, torch.randint(2, (u, n), generator=source), head, weights))
    return found


def of_one(task, r):
    x, y, weights = (t if t is None or len(t) == 1 else t[r : r + 1] for t in (task.x, task.y, task.weights))
    return replace(task, x=x, y=y, weights=weights)


def test_a_pool_of_shared_and_own_tasks_has_each_replicas_own(generator):
    data = tasks(generator)
    pool, orders = Pool(data, lambda k: 2, 3), torch.stack([torch.randperm(32, generator=generator) for _ in range(3)])
    assert len(pool) == 32
    found = pool.minibatch(pool.places(orders))
    assert torch.equal(found.rows, orders)
    for r in range(3):
        alone = Pool([of_one(task, r) for task in data], lambda k: 2, 1)
        wanted = alone.minibatch(alone.places(orders[r : r + 1]))
        for mine, other in zip(found[:3], wanted[:3], strict=True):
            assert torch.equal(mine[r : r + 1], other)


@pytest.mark.parametrize("sampler", [shuffled, Mixed(0.4)], ids=["shuffled", "mixed"])
@pytest.mark.parametrize("chain", [True, False])
def test_replicas_of_such_a_pool_are_their_solo_runs(sampler, chain, generator):
    """So they saw the same examples in the same order."""
    data, method = tasks(generator), replace(METHODS["naive"], name="mine", learn=fitting(sampler=sampler))

    def trained(seeds, own):
        network = evcl.nn.mlp(4, [6]) if chain else torch.nn.Sequential(evcl.nn.mlp(4, [6]), torch.nn.Tanh())
        given = {"epochs": 2, "batch_size": 6, "lr": 0.01, "lr_schedule": "cosine"}
        run = run_of(method, seeds=seeds, network=network, features=6, heads=[2, 2, 2], **given)
        run.learn(own)
        return run.network.posterior.mean

    mean = trained([4, 5, 6], data)
    for r in range(3):
        alone = trained([4 + r], [of_one(task, r) for task in data])
        torch.testing.assert_close(mean[r : r + 1], alone, rtol=1e-9, atol=1e-9)
