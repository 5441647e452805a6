"""Coresets: what is learned from, what predicts, and what stays as it was."""

from __future__ import annotations

import pytest
import torch
from calls import heard
from checks import run_of, same, state

import evcl
from evcl.experiments import configure, execute
from evcl.methods import METHODS, packing
from evcl.training import Observer, TaskData, learn_stream

F64 = torch.float64
N, M = 41, 12  # examples of a task, and of its coreset
VCL = ["vcl-random-coreset", "vcl-kcenter-coreset"]
ONLY = ["random-coreset", "kcenter-coreset"]


def tasks(source, replicas=1):
    """Two tasks of two and three classes; an example's first number says which it is."""
    found = []
    for head, classes in enumerate((2, 3)):
        x = torch.randn(replicas, N, 5, generator=source, dtype=F64)
        x[..., 0] = torch.arange(N) / 100 + head
        found.append(TaskData(x, torch.randint(classes, (replicas, N), generator=source), head))
    return found


def new(method, seeds=(0,), **given):
    usual = {"epochs": 3, "batch_size": 8, "lr": 0.01, "coreset_size": M}
    usual = {name: value for name, value in usual.items() if name in METHODS[method].known_settings}
    return run_of(method, evcl.nn.mlp(5, [6]), {**usual, **given}, seeds, dtype=F64)


def learned(method, data, seeds=(0,), observer=None, **given):
    run = new(method, seeds, **given)
    for task in data:
        run.add_head(6, task.head + 2)
        run.learn([task], observer=observer)
    return run


def equal(a, b):
    """Of two posteriors."""
    both = [a.mean, a.log_std], [b.mean, b.log_std]
    return all(x is y or torch.equal(x, y) for x, y in zip(*both, strict=True))


def ids(x):
    return {round(100 * i) for i in x[:, 0].tolist()}


@pytest.fixture
def seen():
    """The examples [R][...] that each pool of training shows, by their first number; a list a pool."""
    pools = {}

    def note(given):
        step, rows = given["self"], given["rows"]
        shown = pools.setdefault(id(step), (step, [set() for _ in rows]))[1]
        for r, x in enumerate(TaskData(step.pool.x, step.pool.y, -1).take(rows)[0]):
            shown[r] |= ids(x)

    with heard("Step.__call__", note):
        yield lambda: [shown for _, shown in pools.values()]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("method", [*VCL, "evcl"])
def test_a_coreset_is_kept_out_of_training_and_all_of_them_tune(method, shared, seen, generator):
    given = {"coreset": "random"} if method == "evcl" else {}
    run = learned(method, tasks(generator, 1 if shared else 2), seeds=(0, 1), **given)
    first, tuning, second, both = seen()
    for r in range(2):
        coresets = [ids(task.x[r]) for task in run.memory.kept]
        assert [len(c) for c in coresets] == [M, M]
        assert first[r] == set(range(N)) - coresets[0]
        assert tuning[r] == coresets[0]
        assert second[r] == set(range(100, 100 + N)) - coresets[1]
        assert both[r] == coresets[0] | coresets[1]
    if run.settings.coreset == "random" or not shared:
        assert first[0] != first[1]


@pytest.mark.parametrize("method", [*VCL, "evcl"])
def test_the_copy_is_thrown_away_and_is_one_task_more(method, generator):
    """q_t is, bit for bit, what training on the rest gives; the copy, what training on the coresets makes of q_t."""
    data = tasks(generator)
    plain_name = "evcl" if method == "evcl" else "vcl"
    given = {"posterior": "diagonal"} if method == "evcl" else {}
    run = learned(method, data, **given, **({"coreset": "kcenter"} if method == "evcl" else {}))
    plain = new(plain_name, **given)
    for task, coreset in zip(data, run.memory.kept, strict=True):
        kept = set(coreset.x[0, :, 0].tolist())
        rest = [i for i in range(N) if float(task.x[0, i, 0]) not in kept]
        plain.add_head(6, task.head + 2)
        plain.learn([TaskData(task.x[:, rest], task.y[:, rest], task.head)])
    assert equal(run.network.posterior, plain.network.posterior)
    inner, alone = (packing.tensors(memory) for memory in (run.memory.inner, plain.memory))
    alone = {name: t for name, t in alone.items() if not name.startswith("classes/")}  # with coresets: one softmax
    assert inner.keys() == alone.keys()
    assert all(torch.equal(inner[name], alone[name]) for name in inner)
    assert run.rounds == plain.rounds == 2

    before = plain.predict(data[0].x, 0)
    plain.rounds = -2  # the batches and the noise of tuning after the second round
    plain.learn(run.memory.kept)
    assert equal(run.memory.tuned, plain.network.posterior)
    assert torch.equal(run.predict(data[0].x, 0), plain.predict(data[0].x, 0))
    assert not torch.allclose(run.predict(data[0].x, 0), before, atol=1e-3)


def test_tuning_weighs_the_prior_by_the_coresets_size(generator):
    sizes = []

    class Noting(Observer):
        def begin_fit(self, stage, step, *_):
            sizes.append(round(0.01 / step.terms[0].weight))

    learned("vcl", tasks(generator), observer=Noting(), coreset="random", tempering=0.01)
    assert sizes == [N - M, M, N - M, 2 * M]


def test_the_elastic_term_holds_the_copy(generator):
    data = tasks(generator)
    moved = []
    for floor in (0.0, 1e6):
        given = {"epochs": 30, "tempering": 0, "std_update": "adam", "strength": 0, "fisher_floor": floor}
        run = learned("evcl", data, coreset="random", **given)
        moved.append(float((run.memory.tuned.mean - run.network.posterior.mean).abs().mean()))
    assert moved[0] > 0.05
    assert moved[1] < 0.1 * moved[0]


@pytest.mark.parametrize("method", ONLY)
def test_coreset_only_learns_from_the_coresets_alone_and_afresh(method, seen, generator):
    data = tasks(generator)
    run = learned(method, data)
    first, second = (shown[0] for shown in seen())
    coresets = [ids(task.x[0]) for task in run.memory.kept]
    assert [first, second] == [coresets[0], coresets[0] | coresets[1]]
    assert len(second) == 2 * M
    assert run.memory.tuned.log_std is None
    fresh = new("naive")
    for task in data:
        fresh.add_head(6, task.head + 2)
    fresh.rounds = -2
    fresh.learn(run.memory.kept)
    assert equal(run.memory.tuned, fresh.network.posterior)


@pytest.mark.parametrize(
    ("method", "name"),  # tests/contract asks it of every method, and of data of either kind
    [(VCL[0], "permuted-digits"), (VCL[1], "split-digits"), (ONLY[0], "split-digits"), (ONLY[1], "permuted-digits")],
)
def test_replicas_are_their_solo_runs(method, name):
    """Streams of their own, or one that all share."""

    def stream(seeds):
        some = seeds if name == "permuted-digits" else seeds[:1]
        benchmarks = [evcl.benchmarks.get(name, seed, 2) for seed in some]
        run = run_of(method, evcl.nn.mlp(64, [20]), {"epochs": 1, "coreset_size": 30}, seeds, dtype=F64)
        return run, learn_stream(run, benchmarks)

    run, together = stream([4, 5])
    for r, seed in enumerate((4, 5)):
        solo, alone = stream([seed])
        for mine, other in zip(run.memory.kept, solo.memory.kept, strict=True):
            assert torch.equal(mine.x[r], other.x[0])
            assert torch.equal(mine.y[r], other.y[0])
        torch.testing.assert_close(run.memory.tuned.mean[r], solo.memory.tuned.mean[0], rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(together.probabilities[0][r], alone.probabilities[0][0], rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(together.accuracy[r], alone.accuracy[0], equal_nan=True)


def test_a_coreset_is_at_most_half_of_a_task(generator):
    x = torch.randn(1, 7, 5, generator=generator, dtype=F64)
    run = new("vcl", coreset="random")
    run.add_head(6, 2)
    for n, kept in ((1, 0), (7, 3), (1, 0)):
        run.learn([TaskData(x[:, :n], torch.arange(n)[None] % 2, 0)])
        assert run.memory.kept[-1].y.shape == (1, kept)
        assert run.predict(x, 0).isfinite().all()


def test_tasks_learned_jointly_have_a_coreset_each(generator):
    run = new("vcl", coreset="random")
    for task in (data := tasks(generator)):
        run.add_head(6, task.head + 2)
    run.learn(data)
    assert [task.head for task in run.memory.kept] == [0, 1]
    rows = [[round(100 * i) % 100 for i in task.x[0, :, 0].tolist()] for task in run.memory.kept]
    assert rows[0] != rows[1]  # drawn each for itself


@pytest.mark.parametrize("epoch", [1, 5])
def test_a_round_that_is_stopped_leaves_the_run_as_it_was(epoch, generator):
    """In the epochs of training, and in those of tuning."""
    data = tasks(generator)
    run = learned("vcl-random-coreset", data[:1])
    run.add_head(6, 3)
    before = state(run)

    class Stop(Observer):
        def end_epoch(self, progress):
            if progress.epoch == epoch:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.learn(data[1:], observer=Stop())
    assert same(run, before)
    assert run.rounds == 1


@pytest.mark.parametrize(("method", "epochs"), [("vcl", 2), ("vcl-random-coreset", 4), ("random-coreset", 2)])
def test_progress_counts_the_epochs_of_tuning(method, epochs):
    events = []
    execute(configure("split-digits", method, seeds=[0], tasks=2, given={"epochs": 2}), events.append)
    counted = [(e.task, e.done) for e in events if e.accuracy is None]
    assert counted == [(task, (task + epoch / epochs) / 2) for task in range(2) for epoch in range(1, epochs + 1)]
    assert [e.done for e in events if e.accuracy is not None] == [0.5, 1]


@pytest.mark.full
def test_a_coreset_restores_what_vcl_forgets():
    """Five permuted tasks, one seed."""
    found = {}
    for method in ("vcl", *VCL):
        config = configure("permuted-digits", method, seeds=[0], given={"epochs": 10})
        found[method] = execute(config).average_accuracy.mean
    assert min(found[method] for method in VCL) > found["vcl"] + 0.1


def test_the_result_names_the_coreset_and_a_name_is_not_contradicted():
    config = configure("split-digits", "evcl", seeds=[0], tasks=1, given={"epochs": 1, "coreset": "kcenter"})
    assert execute(config).config["coreset"] == "kcenter"
    for method, kind in (("vcl", "none"), (VCL[0], "random"), (VCL[1], "kcenter"), (ONLY[0], "random")):
        settings = configure("split-mnist", method, "paper").settings
        assert (settings.coreset, settings.coreset_size) == (kind, 200)
    with pytest.raises(evcl.EvclError, match="coreset must be one of random, not 'kcenter'"):
        configure("split-digits", VCL[0], given={"coreset": "kcenter"})
    with pytest.raises(evcl.EvclError, match="unknown setting of naive 'coreset'"):
        configure("split-digits", "naive", given={"coreset": "random"})
