"""Replicas against solo runs, the closed form against the reference, joint training, and a loss that is lost."""

from __future__ import annotations

import gc
import math
import weakref
from itertools import chain

import numpy as np
import pytest
import torch
from calls import heard
from checks import refused, run_of, same, state
from torch import nn
from torch.nn.utils import skip_init

import evcl
from evcl._core.randomness import GeneratorNoise, generator
from evcl.benchmarks import Benchmark, Examples, Task
from evcl.curvature import Sample, fisher
from evcl.experiments import configure, execute
from evcl.methods import METHODS
from evcl.nn import Gaussian
from evcl.training import Observer, Pool, TaskData, learn_stream
from evcl.training.graphed import period

F64 = torch.float64


@pytest.mark.parametrize(
    ("seeds", "shortest"), [((3,), 1), ((3, 3), 1), ((0, 1, 0, 1), 2), ((0, 1, 0), 3), ((0, 1, 1, 0), 4), (range(3), 3)]
)
def test_seeds_that_repeat_share_an_order(seeds, shortest):
    assert period(seeds) == shortest


class Slice:
    """Replica r's share of another source's noise."""

    def __init__(self, source, replicas, r):
        self.source, self.replicas, self.r = source, replicas, r

    def normal_(self, out):
        return out.copy_(self.source.normal_(out.new_empty(self.replicas, *out.shape[1:]))[self.r : self.r + 1])

    def uniform_(self, out):
        return out.copy_(self.source.uniform_(out.new_empty(self.replicas, *out.shape[1:]))[self.r : self.r + 1])

    def shared(self):
        return self


def noise():
    return GeneratorNoise([generator(seed, "test noise") for seed in range(3)])


def convolutional():
    conv, last = skip_init(nn.Conv2d, 1, 4, 3, stride=2), skip_init(nn.Linear, 36, 10)
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), conv, nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), last, nn.ReLU())


def trained(network, method, given, seeds, source, reference=False, rounds=2):
    """25 steps on each of two tasks of one head, in float64: the posterior, the Fisher and predictions."""
    run = run_of(method, network, [{**g, "batch_size": 56, "epochs": 1} for g in given], seeds, dtype=F64)
    streams = [evcl.benchmarks.get("permuted-digits", seed, 2) for seed in seeds]
    for k in range(rounds):
        x = torch.stack([s[k].train.x for s in streams]).to(F64)
        y = torch.stack([s[k].train.y for s in streams])
        if k == 0:
            run.add_head(run.features(x[0, :1]), 10)
        run.learn([TaskData(x, y, 0)], noise=source(k), reference=reference)
    return {**run.tensors(), "probabilities": run.predict(x[:, :20], 0)}


@pytest.mark.parametrize(
    ("method", "network"),
    [
        *((method, "mlp") for method in ("evcl", "ewc", "vcl", "naive", "huber")),
        ("evcl", "convolutional"),
        *(pytest.param(method, "convolutional", marks=pytest.mark.full) for method in ("ewc", "vcl", "naive", "huber")),
    ],
)
def test_replicas_are_their_solo_runs(method, network):
    """50 steps; each replica has its own seed, data, strength and learning rate; the same noise is handed in."""
    make = convolutional if network == "convolutional" else lambda: evcl.nn.mlp(64, [20, 20])
    given = [{"lr": lr} for lr in (1e-3, 3e-3, 1e-2)]
    if method in ("evcl", "ewc"):
        given = [{**g, "strength": strength} for g, strength in zip(given, (1.0, 100.0, 1e4), strict=True)]
    if method in ("evcl", "vcl"):
        given = [{**g, "init_std": std} for g, std in zip(given, (0.001, 0.01, 0.05), strict=True)]
    together = trained(make(), method, given, [5, 6, 7], lambda k: noise())
    for r in range(3):
        alone = trained(make(), method, given[r : r + 1], [5 + r], lambda k, r=r: Slice(noise(), 3, r))
        for name, found in together.items():
            torch.testing.assert_close(found[r : r + 1], alone[name], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("method", "rounds"), [("evcl", 1), ("vcl", 1), ("ewc", 2)])
def test_the_fast_step_is_the_reference_step(method, rounds):
    """One round where there is a KL: in the second, weights without data rest at the prior, where the reference has a
    rounding error in place of 0, and Adam makes steps of it. The terms' own tests compare those gradients.
    """
    given = {} if method == "ewc" else {"std_update": "adam"}
    runs = [
        trained(evcl.nn.mlp(64, [20]), method, [given], [3], lambda k: None, reference=reference, rounds=rounds)
        for reference in (False, True)
    ]
    for name in runs[0]:
        torch.testing.assert_close(runs[0][name], runs[1][name], rtol=1e-7, atol=1e-9)


# --- each part of the objective, by hand ---------------------------------------------------------------------------


class Silent:
    """No noise."""

    def normal_(self, out):
        return out.zero_()


def second_task(method, **settings):
    """A run of the plain form of a method that has learned one task, and the data of the next: one head, one step."""
    plain = {"std_update": "adam", "tempering": 0.01}
    plain |= {"fisher_scale": "none", "fisher_temperature": 1.0, "fisher_spread": 0.0}
    settings = {name: value for name, value in plain.items() if name in METHODS[method].known_settings} | settings
    source = torch.Generator().manual_seed(1)
    x = torch.randn(1, 30, 5, generator=source, dtype=F64)
    y = torch.randint(3, (1, 30), generator=source)
    given = {"epochs": 1, "batch_size": 30, "lr": 0.005, **settings}
    run = run_of(method, evcl.nn.mlp(5, [4]), given, heads=(4, [3]), dtype=F64)
    run.learn([TaskData(x, y, 0)], noise=Silent())
    return run, TaskData(x[:, :20] + 0.3, (y[:, :20] + 1) % 3, 0)


@pytest.mark.parametrize("method", ["evcl", "vcl", "ewc"])
def test_a_step_follows_the_objective_as_written(method):
    """NLL + beta/N KL + 1/2 sum (lambda F + floor) [(mu - mu*)^2 + (s2 - s2*)^2], away from the anchor."""
    given = {"strength": 50.0, "fisher_floor": 0.7, "fisher_scale": "task", "distill": 0} if method != "vcl" else {}
    given |= {"posterior": "diagonal"} if method == "evcl" else {}
    run, task = second_task(method, **given)
    old, new = run.memory.prior, run.network.posterior
    moved = new.mean + 0.1, None if new.log_std is None else new.log_std + 0.2
    run.network.posterior = Gaussian(*moved)

    mean = moved[0].clone().requires_grad_()
    log_std = None if moved[1] is None else moved[1].clone().requires_grad_()
    views = run.network.layout.views(mean)
    x, y = task.x[0], task.y[0]
    h = (x @ views["1.weight"][0].mT + views["1.bias"][0]).relu()
    logits = h @ views["head 0.weight"][0].mT + views["head 0.bias"][0]
    loss = torch.nn.functional.cross_entropy(logits, y)
    if method != "ewc":
        q, p = (torch.distributions.Normal(m, s.exp()) for m, s in ((mean, log_std), (old.mean, old.log_std)))
        loss = loss + run.settings.tempering / 20 * torch.distributions.kl_divergence(q, p).sum()
    if method != "vcl":
        change = (mean - old.mean) ** 2
        if log_std is not None:
            change = change + ((2 * log_std).exp() - (2 * old.log_std).exp()) ** 2
        loss = loss + 0.5 * ((50.0 * run.memory.importance + 0.7) * change).sum()
    loss.backward()

    steps = []  # the mean's, then log sigma's
    with heard("rules.Adam.step", lambda given: steps.append((given["grad"].clone(), given["self"].lr))):
        run.learn([task], noise=Silent())
    torch.testing.assert_close(steps[0][0], mean.grad, rtol=1e-10, atol=1e-14)
    if log_std is not None:
        torch.testing.assert_close(steps[1][0], log_std.grad, rtol=1e-10, atol=1e-14)
        assert steps[1][1] == run.settings.lr * run.settings.std_lr_scale


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_importance_accumulates(decay):
    """F <- gamma F_1 + F_2, each the Fisher of its own task at the weights after it."""
    run, task = second_task("evcl", fisher_decay=decay, posterior="diagonal")
    first = run.memory.importance.clone()
    assert (first > 0).any()
    run.learn([task], noise=Silent())
    network = run.network
    second = fisher(Sample(network, network.posterior.mean, network.layout, [0], task.x, task.y))
    torch.testing.assert_close(run.memory.importance, decay * first + second, rtol=1e-10, atol=1e-16)


def zeros(n):
    return TaskData(torch.zeros(1, n, 5), torch.arange(n).unsqueeze(0) % 2, 0)


def test_the_fisher_is_measured_on_as_many_examples_as_asked():
    seen = []
    run = run_of("ewc", evcl.nn.mlp(5, [4]), {"epochs": 1, "fisher_examples": 7}, heads=(4, [2]))
    with heard("curvature.fisher.fisher", lambda given: seen.append(given["sample"].x.shape)):
        for n in (30, 5):
            run.learn([zeros(n)])
    assert seen == [(1, 7, 5), (1, 5, 5)]


def test_every_epoch_shows_every_example_once_in_an_order_of_its_own():
    def orders(seed):
        seen, given = [], {"epochs": 2, "batch_size": 8}
        run = run_of("naive", evcl.nn.mlp(5, [4]), given, [seed], (4, [2]))
        with heard("Step.__call__", lambda given: seen.append(given["rows"][0].tolist())):
            for _ in range(2):
                run.learn([zeros(20)])
        return [[*chain(*seen[i : i + 3])] for i in range(0, 12, 3)]

    found = orders(seed=0)
    assert all(sorted(order) == list(range(20)) for order in found)
    assert len({tuple(order) for order in found}) == 4  # another in each task and epoch
    assert orders(seed=0) == found
    assert orders(seed=1)[0] != found[0]


def test_joint_nll_is_each_heads_own():
    source = torch.Generator().manual_seed(0)
    run = run_of("joint", evcl.nn.mlp(5, [4]), seeds=[0, 1], heads=(4, [2, 3]), dtype=F64)
    tasks = [
        TaskData(torch.randn(1, 6, 5, generator=source, dtype=F64), torch.arange(6).unsqueeze(0) % (2 + head), head)
        for head in range(2)
    ]
    network = run.network
    network.bind(network.posterior.mean, None, network.layout)
    pool = Pool(tasks, run.classes)
    rows = torch.tensor([[0, 5, 6, 11], [11, 1, 7, 2]])
    found = pool.nll(network, rows)
    for r, chosen in enumerate(rows.tolist()):
        each = []
        for row in chosen:
            task = tasks[row // 6]
            p = run.predict(task.x[:, row % 6 : row % 6 + 1], task.head)[r, 0]
            each.append(-p[task.y[0, row % 6]].log())
        torch.testing.assert_close(found[r], torch.stack(each).mean(), rtol=1e-10, atol=0)


def test_a_label_that_is_not_among_the_classes_is_refused():
    x, y = torch.zeros(6, 5), torch.arange(6) % 3
    part = Examples(x, y)
    stream = Benchmark("odd", [Task("odd", "odd", (0, 2), part, part)], hidden=[4])
    with refused("label 1 is not among the classes [0, 2]"):
        learn_stream(run_of("naive", evcl.nn.mlp(5, [4]), {"epochs": 1}), [stream])


def test_streams_may_have_classes_of_their_own():
    """Each replica's labels are places among its own stream's classes."""
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    parts = [Examples(x, torch.tensor(classes)[torch.arange(6) % 2]) for classes in ((0, 2), (7, 5))]
    streams = [
        Benchmark("odd", [Task("odd", "odd", classes, part, part)], hidden=[4])
        for part, classes in zip(parts, ((0, 2), (7, 5)), strict=True)
    ]
    run = run_of("naive", evcl.nn.mlp(5, [4]), {"epochs": 1}, [0, 0])
    found = learn_stream(run, streams)
    assert run.classes(0) == 2
    assert found.labels[0].tolist() == [[0, 1] * 3] * 2
    assert torch.equal(found.probabilities[0][0], found.probabilities[0][1])


def test_evcl_vcl_and_ewc_end_above_naive():
    """What the demo shows, in small: three permuted tasks, one seed."""
    found = {}
    for method in ("evcl", "vcl", "ewc", "naive"):
        config = configure("permuted-digits", method, seeds=[0], tasks=3, given={"epochs": 15})
        found[method] = execute(config).average_accuracy.mean
    assert found["naive"] < 0.75
    assert min(found["evcl"], found["vcl"], found["ewc"]) > found["naive"] + 0.05
    assert found["evcl"] > found["vcl"]


def test_a_precision_that_cannot_be_kept_is_refused():
    with refused("precision must be fp32, tf32 or bf16, not 'fp8'"):
        run_of("naive", evcl.nn.mlp(5, [4]), precision="fp8")


def test_an_idle_head_that_is_not_taught_does_not_move():
    benchmark = evcl.benchmarks.get("split-digits")
    learner = evcl.EVCL(evcl.nn.mlp(64, [20]), epochs=2, distill=0)
    learner.learn(benchmark[0])

    def heads():
        network = learner.state.run.network
        views = [network.layout.views(t) for t in (network.posterior.mean, network.posterior.log_std)]
        return [v[name].clone() for v in views for name in ("head 0.weight", "head 0.bias")]

    before = heads()
    learner.learn(benchmark[1])
    assert all(torch.equal(a, b) for a, b in zip(before, heads(), strict=True))


def test_a_lost_loss_stops_says_where_and_keeps_the_last_good_state():
    benchmark = evcl.benchmarks.get("split-digits")
    learner = evcl.EWC(evcl.nn.mlp(64, [20]), epochs=1)
    learner.learn(benchmark[0])
    before = state(learner)
    huge = torch.full((8, 64), 3e38)
    with pytest.raises(evcl.Diverged, match=r"task 'bad': the loss is not a number in epoch 1 of 3 .*smaller lr"):
        learner.learn((huge, [0, 1] * 4), task="bad", epochs=3)
    assert learner.tasks == ("0/1",)
    assert same(learner, before)
    learner.learn(benchmark[1])  # and it goes on
    assert learner.tasks == ("0/1", "2/3")


def test_what_was_lost_in_a_round_that_was_interrupted_is_not_lost():
    """Of two replicas the first one diverges, and the others go on; stopped then, all of it is as it was."""
    x = torch.randn(1, 16, 4, generator=torch.Generator().manual_seed(0))
    huge = torch.stack([torch.full_like(x[0], 3e38), x[0]])
    before = run_of("ewc", evcl.nn.mlp(4, [4]), {"epochs": 3}, [0, 1], (4, [2]), allow_divergence=True)
    run, seen = before.forked(before.network.call), []

    class Interrupt(Observer):
        def end_epoch(self, progress):
            seen.append(run.diverged.tolist())
            if len(seen) == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.learn([TaskData(huge, torch.tensor([[0, 1] * 8] * 2), 0)], observer=Interrupt())
    assert seen[-1] == [True, False]
    assert before.diverged.tolist() == [False, False]
    before.learn([TaskData(x, (x[..., 0] > 0).long(), 0)])
    assert before.diverged.tolist() == [False, False]


def test_memory_and_buffers_do_not_grow_with_tasks():
    """Whether one softmax is asked for, or the tasks are months of a table that drifts: its mean, and its rule."""

    def month(k):
        x = torch.randn(300, 4, generator=torch.Generator().manual_seed(k))
        y = (math.cos(0.1 * k) * x[:, 1] + math.sin(0.1 * k) * x[:, 2] > 0).long()
        x[:, 0] += 0.5 * k
        return x, y

    permuted = [(task.train.x, task.train.y) for task in evcl.benchmarks.get("permuted-digits", tasks=4)]
    for tasks, given in ((permuted, {"one_softmax": True}), ([month(k) for k in range(10)], {})):
        learner = evcl.EVCL(evcl.nn.mlp(tasks[0][0].shape[1], [10]), epochs=1, **given)
        sizes = []
        for k, task in enumerate(tasks):
            learner.learn(task, str(k), "0" if k else "new")
            sizes.append(sum(t.numel() for t in learner.state.run.tensors().values()))
        assert len(set(sizes)) == 1


def test_a_domain_adds_a_softmax_and_the_likelihoods_of_its_classes():
    sizes, learner = [], evcl.EVCL(evcl.nn.mlp(64, [10]), epochs=1)
    for k, task in enumerate(evcl.benchmarks.get("permuted-digits", tasks=4)):
        learner.learn((task.train.x, task.train.y), str(k), "0" if k else "new")
        sizes.append(sum(t.numel() for t in learner.state.run.tensors().values()))
    width = learner.state.run.memory.classes.classes[0].shape[2]
    weights, per_weight = 10 * (10 + 1), len(("mean", "log_std", "prior mean", "prior log_std", "importance", "used"))
    rows_and_beta, factors = 2, (10 + 1) ** 2 + 10**2
    assert set(np.diff(sizes)) == {per_weight * weights + factors + 10 * width + rows_and_beta}


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("network", ["mlp", "convolutional"])
def test_a_tasks_buffers_go_with_it(network, dtype):
    """At once, and not when Python looks for cycles, which it may do many tasks later."""
    steps = []

    class Noting(Observer):
        def begin_fit(self, stage, step, *_):
            steps.append(weakref.ref(step))

    made = convolutional() if network == "convolutional" else evcl.nn.mlp(64, [10])
    run = run_of("evcl", made, {"epochs": 1}, heads=(10, [2]), dtype=dtype)
    x = torch.rand(1, 30, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    gc.collect()
    gc.disable()
    try:
        run.learn([TaskData(x, torch.arange(30).unsqueeze(0) % 2, 0)], observer=Noting())
        assert [step() for step in steps] == [None]
    finally:
        gc.enable()


def test_falling_rates_reach_every_form_of_the_update():
    """Bayesian: what native.c does, if it is there, is what the reference does."""
    plain = {"lr_schedule": "cosine", "epochs": 3, "batch_size": 56, "init_std": 0.02, "tempering": 0.01}
    given = [{"lr": lr, **plain} for lr in (1e-3, 1e-2)]
    found = []
    for dtype in (torch.float32, F64):
        run = run_of("evcl", evcl.nn.mlp(64, [20]), given, [1, 2], (20, [10]), dtype=dtype)
        task = evcl.benchmarks.get("permuted-digits", 0, 1)[0].train
        run.learn([TaskData(task.x.unsqueeze(0).to(dtype), task.y.unsqueeze(0), 0)])
        found.append(run.network.posterior)
    torch.testing.assert_close(found[0].mean.double(), found[1].mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[0].log_std.double(), found[1].log_std, rtol=1e-3, atol=1e-3)
