"""The memory of examples: what it keeps, that it stays small, who can have it; and in which order a fit sees them."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import pytest
import small_runs
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_runs import F64, first_fit, fitting, round_of, run_of, task
from torch import nn

import evcl
from evcl._core.errors import EvclError
from evcl._core.randomness import generator
from evcl.experiments import configure, execute
from evcl.methods import METHODS, Fit, Interleaved, Learned, Method, Mixed, TaskData, known_settings, shuffled
from evcl.methods.rehearsal import ALL_ROWS_KEY, Rehearsal, by_class, filled, hypergeometric, reservoir
from evcl.training import Pool

NAMES = ("er", "derpp", "agem", "evcl-er")


def kept_of(run):
    memory = run.memory
    return memory if isinstance(memory, Rehearsal) else memory.rehearsal


def learned(labels, heads=None, method="er", replicas=1, classes=None, **given):
    """A run that has learned a task for each tensor of labels; the inputs are the task's number and the row's."""
    heads = list(heads or [0] * len(labels))
    classes = classes or [1 + max(int(y.max()) for y in labels)] * (1 + max(heads))
    usual = {"epochs": 1, "batch_size": 50}
    run = run_of(method, replicas, evcl.nn.mlp(2, [3]), features=3, heads=classes, usual=usual, **given)
    for k, (y, head) in enumerate(zip(labels, heads, strict=True)):
        x = torch.stack([torch.full((len(y),), float(k)), torch.arange(len(y))], 1).double()
        run.learn([TaskData(x.unsqueeze(0), y.unsqueeze(0), head, task=k)])
    return run


def counts(run, r=0):
    """(task, head, class) -> number of kept rows."""
    found = {}
    for one in kept_of(run).kept:
        for c in one.y[r].tolist():
            found[one.task, one.head, c] = found.get((one.task, one.head, c), 0) + 1
    return found


def labels_of(*numbers):
    """Labels 0, 1, ... as often as these numbers say."""
    return torch.cat([torch.full((n,), c) for c, n in enumerate(numbers) if n])


# --- balanced --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", NAMES)
def test_each_class_has_as_many_rows_as_classes_grow(method):
    labels = [labels_of(*[0] * (2 * k), 40 + 5 * k, 70) for k in range(5)]
    for tasks in range(1, 6):
        run = learned(labels[:tasks], method=method, memory=60, classes=[10])
        found = counts(run)
        assert sum(found.values()) == 60
        assert len(found) == 2 * tasks
        assert max(found.values()) - min(found.values()) <= 1


@pytest.mark.parametrize(
    ("labels", "heads", "memory", "kept"),
    [
        ([(50, 30, 20)] * 4, None, 48, {(k, 0, c): 4 for k in range(4) for c in range(3)}),
        ([(50, 30)] * 4, range(4), 40, {(k, k, c): 5 for k in range(4) for c in range(2)}),
        ([(40, 40), (0, 40, 40)], None, 24, {(0, 0, 0): 8, (0, 0, 1): 4, (1, 0, 1): 4, (1, 0, 2): 8}),
        ([(3, 100), (100, 100)], None, 40, {(0, 0, 0): 3, (0, 0, 1): 17, (1, 0, 0): 10, (1, 0, 1): 10}),
    ],
    ids=["each task", "each head", "a class that comes again", "a class of few rows"],
)
def test_how_the_memory_is_divided(labels, heads, memory, kept):
    """A class of a later task again shares its part among its tasks; one with few rows leaves its place to others."""
    found = counts(learned([labels_of(*numbers) for numbers in labels], heads=heads, memory=memory))
    assert found == kept


def test_a_memory_that_is_large_enough_keeps_every_row():
    run = learned([labels_of(10, 20), labels_of(5, 7)], memory=1000)
    for k, one in enumerate(kept_of(run).kept):
        assert sorted(one.x[0, :, 1].tolist()) == list(range((30, 12)[k]))
        assert bool((one.x[0, :, 0] == k).all())


@pytest.mark.parametrize("policy", ["balanced", "reservoir"])
def test_kept_rows_are_rows_with_their_labels_of_each_seed_its_own(policy):
    y = torch.randint(3, (100,), generator=generator(0, "labels"))
    run = learned([y] * 3, heads=[0, 1, 0], replicas=2, memory=30, memory_policy=policy)
    for one in kept_of(run).kept:
        assert one.head == (0, 1, 0)[one.task]
        for r in range(2):
            rows = one.x[r, :, 1].long()
            assert len(set(rows.tolist())) == len(rows)
            assert torch.equal(one.y[r], y[rows])
            assert bool((one.x[r, :, 0] == one.task).all())
    assert not torch.equal(kept_of(run).kept[0].x[0], kept_of(run).kept[0].x[1])


def test_rows_are_divided_in_proportion():
    source = generator(0, "test")
    assert filled([100, 100, 100], [1, 1, 2], 40, source) == [10, 10, 20]
    assert filled([5, 100, 100], [1, 1, 1], 45, source) == [5, 20, 20]
    assert filled([5, 6], [1, 1], 100, source) == [5, 6]
    assert filled([], [], 10, source) == []
    assert sorted(filled([10] * 3, [1.0] * 3, 10, source)) == [3, 3, 4]
    y = torch.tensor([[0, 0, 0, 0, 1, 1, 2]])
    first = y[0][by_class(y, torch.tensor([1.0, 1.0, 1.0]).double())[0]]
    assert sorted(first[:3].tolist()) == [0, 1, 2]
    assert sorted(first[3:5].tolist()) == [0, 1]


# --- the reservoir ---------------------------------------------------------------------------------------------------


def chi_square(found, expected):
    """How many standard deviations the statistic is above its mean, under the hypothesis of equal probabilities."""
    statistic = float(((found - expected) ** 2 / expected).sum())
    return (statistic - (len(found) - 1)) / math.sqrt(2 * (len(found) - 1))


def test_a_reservoir_is_uniform_over_everything_seen():
    """100,000 rows in 10 tasks of different sizes: each row is as likely to be kept, whenever it was seen."""
    sizes = [1000, 20_000, 500, 8500, 30_000, 5000, 5000, 15_000, 10_000, 5000]
    starts = torch.tensor(sizes).cumsum(0) - torch.tensor(sizes)
    seen = torch.zeros(sum(sizes))
    most, times = 1000, 200
    for seed in range(times):
        kept, total = [], 0
        for k, n in enumerate(sizes):
            source = generator(seed, "counts", k)
            new = starts[k] + torch.randperm(n, generator=generator(seed, "rows", k))
            found = reservoir([len(one) for one in kept] + [n], len(kept), total, most, source)
            kept = [one[:m] for one, m in zip([*kept, new], found, strict=True)]
            total += n
        rows = torch.cat(kept)
        assert len(rows) == most == len(rows.unique())
        seen[rows] += 1
    by_place = seen.view(-1, 250).sum(1)  # 400 groups of neighbours, each with 500 expected
    assert abs(chi_square(by_place, times * most * 250 / sum(sizes))) < 4


def test_the_number_of_a_groups_rows_is_hypergeometric():
    found = torch.tensor([hypergeometric([6, 3, 1], 4, generator(k, "draw")) for k in range(4000)])
    assert torch.equal(found.sum(1), torch.full((4000,), 4))
    for group, size in enumerate((6, 3, 1)):
        ways = [math.comb(size, k) * math.comb(10 - size, 4 - k) / math.comb(10, 4) for k in range(min(size, 4) + 1)]
        often = torch.bincount(found[:, group], minlength=len(ways)) / 4000
        torch.testing.assert_close(often, torch.tensor(ways), atol=0.03, rtol=0)
    assert hypergeometric([0, 5], 3, generator(0, "draw")) == [0, 3]


def test_a_run_keeps_a_reservoir_of_all_rows():
    run = learned([labels_of(500, 100)] * 5, memory=100, memory_policy="reservoir", classes=[2])
    rows = [one.y.shape[1] for one in kept_of(run).kept]
    assert sum(rows) == 100
    assert all(5 <= n <= 40 for n in rows)
    y = torch.cat([one.y[0] for one in kept_of(run).kept])
    assert 0.7 < float((y == 0).double().mean()) < 0.95  # as often as in the data
    assert int(kept_of(run).rows[ALL_ROWS_KEY]) == 3000


# --- bounded, saved, resumed -----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("policy", ["balanced", "reservoir"])
def test_the_state_stays_flat_over_1000_tasks(policy):
    """Tasks that have lost all their rows leave nothing behind; new ones still get some."""
    usual = {"epochs": 1, "memory": 30, "memory_policy": policy}
    run = run_of("er", network=evcl.nn.mlp(2, [3]), features=3, heads=[2], usual=usual)
    y, sizes, newest = labels_of(3, 3).unsqueeze(0), [], 0
    for k in range(1000):
        one = TaskData(torch.randn(1, 6, 2, generator=generator(k, "x")).double(), y, 0, task=k)
        if k < 5:
            run.learn([one])
        else:  # without training, which would take minutes
            after = kept_of(run).after(round_of(run, [one], number=k), run.settings)
            run.memory = type(run.memory)(run.memory.inner, after)
        kept = kept_of(run)
        assert sum(one.n for one in kept.kept) == min(30, 6 * (k + 1))
        assert kept.rows.keys() == {ALL_ROWS_KEY, *range(len(kept.kept))}
        newest += any(one.task == k for one in kept.kept)
        sizes.append(sum(t.numel() for t in run.tensors().values()) - sum(t.numel() for t in kept.rows.values()))
    assert max(sizes) == sizes[-1] == sizes[40]
    assert newest > (800 if policy == "balanced" else 50)


@pytest.mark.parametrize("method", NAMES)
def test_without_a_memory_it_is_training_without_one(method):
    """And two memories end elsewhere."""
    given = [(method, {"memory": n}) for n in (0, 4, 20)] + [({"evcl-er": "evcl"}.get(method, "naive"), {})]
    found, few, more, wanted = (
        small_runs.learned(name, small_runs.TASKS[:2], **one).network.posterior.mean for name, one in given
    )
    assert torch.equal(found, wanted)
    for one, other in combinations((found, few, more), 2):
        assert float((one - other).abs().max()) > 1e-3


# --- replay ----------------------------------------------------------------------------------------------------------


def test_a_step_has_as_many_kept_rows_as_new_ones_each_through_its_own_head():
    run = run_of("er", memory=10, batch_size=8)
    run.learn([task(0, 0)])
    assert first_fit(run_of("er"), [task(0, 0)]).batch is None
    fit = first_fit(run, [task(1, 1)])
    assert (fit.batch, [one.head for one in fit.data]) == (16, [1, 0])
    rows = fit.sampler([30, 10], 16, generator(0, "order"))
    assert sorted(rows[rows < 30].tolist()) == list(range(30))
    assert [int((part >= 30).sum()) for part in rows.split(16)] == [8, 8, 8, 6]
    before = run.network.layout.view(run.network.posterior.mean, "head 0.weight").clone()
    run.learn([task(1, 1)])
    assert not torch.equal(run.network.layout.view(run.network.posterior.mean, "head 0.weight"), before)


def test_the_interleaved_order():
    rows = Interleaved(tasks=2, kinds=2)([3, 4, 5, 5], 8, generator(0, "order"))
    assert sorted(rows[::2].tolist()) == list(range(7))
    for step in rows.split(8):
        assert bool(((step[1::4] >= 7) & (step[1::4] < 12)).all())
        assert bool(((step[3::4] >= 12) & (step[3::4] < 17)).all())


# --- any method ------------------------------------------------------------------------------------------------------

CAN = [name for name, one in METHODS.items() if not one.jointly and not one.no_memory and "memory" not in one.settings]
CAN = [name for name in CAN if "coreset" not in name and not name.startswith("plugin")]


@pytest.mark.parametrize("method", CAN)
def test_any_method_takes_a_memory(method, tmp_path):
    benchmark = evcl.benchmarks.get("split-digits", tasks=3)
    learner = evcl.Learner(evcl.nn.mlp(64, [20]), method, memory=30, epochs=2)
    for one in benchmark[:2]:
        learner.learn(one)
    assert sum(one.y.shape[1] for one in kept_of(learner.state.run).kept) == 30
    learner.save(tmp_path / "model.safetensors")
    loaded = evcl.load(tmp_path / "model.safetensors")
    for each in (learner, loaded):
        each.learn(benchmark[2])
    assert learner.evaluate(benchmark) == loaded.evaluate(benchmark)


def test_naive_training_with_a_memory_is_er_and_evcl_with_one_is_evcl_er():
    for name, other in (("naive", "er"), ("evcl", "evcl-er")):
        found = execute(configure("split-digits", name, "default", (0,), 2, {"memory": 20, "epochs": 2}))
        wanted = execute(configure("split-digits", other, "default", (0,), 2, {"memory": 20, "epochs": 2}))
        assert found.accuracy == wanted.accuracy
        assert found.nll == wanted.nll
        assert found.memory_bytes == wanted.memory_bytes


@pytest.mark.parametrize(
    ("method", "given", "why"),
    [
        ("joint", {}, "it learns all tasks at once"),
        ("vcl-random-coreset", {}, "it keeps coresets"),
        ("vcl", {"coreset": "kcenter"}, "it keeps coresets"),
        ("random-coreset", {}, "it keeps coresets"),
        ("ekf", {}, "a filter sees each row once"),
        ("vogn", {}, "its update rule"),
        ("xdg", {}, "kept rows of earlier tasks would need"),
    ],
)
def test_what_cannot_be_combined_is_refused(method, given, why):
    with pytest.raises(EvclError, match=f"{method} cannot have a memory of examples: {why}"):
        evcl.Learner(evcl.nn.mlp(64, [20]), method, memory=20, **given)


def test_a_method_of_your_own_says_why_it_cannot_have_a_memory():
    method = Method("mine", "an example", bayesian=False, no_memory="it has none to spare")
    with pytest.raises(EvclError, match="mine cannot have a memory of examples: it has none to spare"):
        evcl.Learner(evcl.nn.mlp(64, [5]), method, memory=20)
    learner = evcl.Learner(evcl.nn.mlp(64, [5]), method)
    with pytest.raises(EvclError, match="it has none to spare"):
        learner.keep(20)


def test_a_method_whose_fits_are_others_is_refused():
    def learn(memory, round_, s):
        fitted = yield Fit([one.select(torch.zeros(1, 3, dtype=torch.long)) for one in round_.tasks])
        return Learned(fitted.q, memory)

    learner = evcl.Learner(evcl.nn.mlp(64, [5]), Method("mine", "an example", False, learn), memory=20)
    with pytest.raises(EvclError, match="mine cannot have a memory: its fits do not simply train"):
        learner.learn(evcl.benchmarks.get("split-digits", tasks=1)[0])


def test_only_a_given_memory_is_a_setting():
    assert "memory" not in METHODS["ewc"].known_settings
    assert "memory" not in known_settings(METHODS["ewc"], {"strength": 1})
    assert {"memory", "memory_policy"} <= known_settings(METHODS["ewc"], {"memory": 5}).keys()
    assert "replay_share" in known_settings(METHODS["kfac-evcl"], {"memory": 5})


def test_lwf_distils_on_kept_rows_too():
    run = run_of("lwf", memory=10, epochs=1)
    run.learn([task(0, 0)])
    fit = first_fit(run, [task(1, 1)])
    ((loss,), x) = fit.losses, torch.cat([one.x for one in fit.data], 1)
    z = evcl.nn.outputs(run.network, run.network.posterior.mean, run.network.layout, x, [0])
    torch.testing.assert_close(loss.said[0], (z / 2).log_softmax(2))
    assert loss.said[0].shape[1] == 40


def test_inputs_of_another_shape_are_refused():
    network = nn.Sequential(nn.Flatten(), nn.utils.skip_init(nn.Linear, 4, 3), nn.ReLU())
    run, y = run_of("er", network=network, features=3, epochs=1), torch.tensor([[0, 1, 1]])
    run.learn([TaskData(torch.randn(1, 3, 2, 2, generator=generator(0, "x")).double(), y, 0)])
    with pytest.raises(EvclError, match=r"a memory needs inputs of one shape, but \(4,\) follows \(2, 2\)"):
        run.learn([TaskData(torch.randn(1, 3, 4, generator=generator(1, "x")).double(), y, 0, task=1)])


# --- the order of a fit's examples -----------------------------------------------------------------------------------


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
