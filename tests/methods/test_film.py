"""FiLM: rows of scales and shifts that belong to a task, compared with plain PyTorch."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
import small_runs
import torch
import torch.nn.functional as F
from small_runs import F64, named, run_of
from torch import nn

import evcl
from evcl import curvature
from evcl._core.randomness import GeneratorNoise
from evcl.methods import METHODS, Fit, Learned, Method, TaskData
from evcl.nn import bayesianize
from evcl.nn.chain import find_chain
from evcl.nn.film import EPSILON, FILM_RATE_FACTOR
from evcl.nn.per_task import Mixture

sys.path.insert(0, str(Path(__file__).parents[1] / "nn"))
import models


def convolutional():
    layers = [nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 5)]
    return nn.Sequential(*layers)


def drawn(make):
    """A module whose weights come from a seed; torch's generator is as before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def plain(name):
    made = {
        "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU()),
        "convolutions": convolutional,
        "transformer": models.vit,
        "batch second": Second,
        "a volume": lambda: nn.Sequential(
            nn.Unflatten(2, (2, 3)), nn.Conv3d(1, 2, (1, 2, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(40, 3)
        ),
    }
    return drawn(made[name])


class Second(nn.Module):
    """torch's transformer with the batch as the second axis, its default."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 5, 0.0)

    def forward(self, x):
        return self.layer(x.squeeze(1).transpose(0, 1)).mean(0)


NETWORKS = ["mlp", "convolutions", "transformer", "batch second", "a volume"]


def filmed(name, replicas=1, tasks=2, **options):
    """A network with random rows, except that row 0 changes nothing, and the plain module."""
    module = plain(name).double().eval()
    network = bayesianize(module, init_std=None, replicas=replicas, film=True, dtype=F64, **options)
    network.add_task_weights(tasks)
    source = torch.Generator().manual_seed(1)
    rows = network.task_weights.table[:, 1:]
    rows += 0.5 * torch.randn(rows.shape, generator=source, dtype=F64)
    network.bind(network.posterior.mean, None, network.layout)
    return module, network


def images(count, seed=2):
    return torch.randn(count, 1, 6, 6, generator=torch.Generator().manual_seed(seed), dtype=F64)


def by_hand(module, network, x, task, r=0):
    """The plain module with weights scaled and biases shifted, layer by layer: W <- c W, bias <- c bias + b."""
    module = copy.deepcopy(module)
    for name, span in network.task_weights.kind.parts.items():
        scale, shift = network.task_weights.table[r, task, :, span]
        path, _, key = name.rpartition(".")
        owner, other = module.get_submodule(path), key.replace("weight", "bias")
        weight, bias = getattr(owner, key), getattr(owner, other)
        axes = [1] * (weight.dim() - 1)
        bias = shift if bias is None else bias * scale + shift
        setattr(owner, key, nn.Parameter(weight.detach() * scale.view(-1, *axes)))
        setattr(owner, other, nn.Parameter(bias.detach()))
    with torch.no_grad():
        return module(x)


@pytest.mark.parametrize("name", NETWORKS)
def test_rows_scale_and_shift_every_layer_of_each_replica_and_examples_may_be_of_several_tasks(name):
    """The first row changes no bit."""
    module, network = filmed(name, replicas=2, tasks=3)
    x, without = images(5), bayesianize(module, init_std=None, replicas=2, dtype=F64)
    with torch.no_grad(), network.using(0):
        assert torch.equal(network(torch.cat([x, x])), without(torch.cat([x, x])))
    places = torch.tensor([[0, 1, 1, 0, 1], [1, 0, 1, 1, 0]])
    with torch.no_grad(), network.using(2):
        alone = network(torch.cat([x, x])).view(2, 5, -1)
    with torch.no_grad(), network.using(Mixture([2, 1], places)):
        mixed = network(torch.cat([x, x])).view(2, 5, -1)
    for r in range(2):
        each = [by_hand(module, network, x, task, r) for task in (2, 1)]
        torch.testing.assert_close(alone[r], each[0])
        torch.testing.assert_close(mixed[r], torch.stack(each)[places[r], torch.arange(5)])
    assert not torch.allclose(alone[0], alone[1], rtol=1e-2)


def test_fixed_layers_have_film_too():
    module, network = filmed("convolutions", skip="0")
    assert network.task_weights.kind.parts.keys() == {"0.weight", "4.weight"}
    with network.using(1), torch.no_grad():
        torch.testing.assert_close(network(images(3)), by_hand(module, network, images(3), 1))


# --- training --------------------------------------------------------------------------------------------------------


USUAL = {"epochs": 3, "batch_size": 24, "film": True, "lr_schedule": "constant"}
FIRST = torch.tensor([[1.0], [0.0]], dtype=F64)  # a row that changes nothing


def made(method, network=None, heads=(3,), **given):
    options = {"draw": network is None}
    return run_of(method, network=network, hidden=(8, 6), heads=heads, usual=USUAL, options=options, **given)


def task(number, head=0):
    return small_runs.task(number, head, 24, classes=3)


def said(w, row, x):
    """What a perceptron says of x with the scales and shifts of a row [2, units]."""
    for layer, units in (("1", slice(0, 8)), ("3", slice(8, 14))):
        x = torch.relu(row[0, units] * (x @ w[f"{layer}.weight"].T + w[f"{layer}.bias"]) + row[1, units])
    return x @ w["head 0.weight"].T + w["head 0.bias"]


def test_training_equals_plain_pytorch():
    """Two tasks that share a head, by Adam with two learning rates, in full batches."""
    run, lr = made("naive", lr=0.01), 0.01
    weights = {name: w.requires_grad_() for name, w in named(run, run.network.posterior.mean).items()}
    rows = [FIRST.repeat(1, 14).requires_grad_() for _ in range(2)]
    narrowest = (2 / 8) ** 0.5
    for number, row in enumerate(rows):
        data = task(number)
        run.learn([data])
        film = {"params": [row], "lr": FILM_RATE_FACTOR * lr / narrowest, "eps": EPSILON}
        adam = torch.optim.Adam([{"params": list(weights.values())}, film], lr=lr)
        for _ in range(3):
            adam.zero_grad()
            F.cross_entropy(said(weights, row, data.x[0]), data.y[0]).backward()
            adam.step()
    small_runs.assert_weights(run, run.network.posterior.mean, weights)
    table = run.network.task_weights.table[0]
    torch.testing.assert_close(table, torch.stack(rows).detach())
    assert (table[:, 0] - 1).abs().min(1).values.max() > 1e-3  # all have learned


def test_a_shift_that_a_batch_norm_takes_away_does_not_move():
    """In the first task, the norm subtracts the mean of the batch: the shift before it has no effect."""
    network = drawn(lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU()))
    given = {"features": 6, "heads": [3], "usual": {**USUAL, "epochs": 60, "lr": 0.01}}
    run, data = run_of("naive", network=network, options={"dtype": torch.float32}, **given), task(0)
    run.learn([TaskData(data.x.float(), data.y, 0, task=0)])
    assert run.network.task_weights.table[0, 0, 1].abs().max() < 0.01  # with torch's epsilon: 0.3


@pytest.mark.parametrize("method", ["evcl", "naive"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_chain_computes_what_autograd_does(method, bias):
    """The same noise, by both passes; after the first step scales are not 1."""
    ends, given = [], {} if method == "naive" else {"distill": 0.0}
    network = drawn(lambda: nn.Sequential(nn.Linear(5, 8, bias=bias), nn.ReLU(), nn.Linear(8, 6), nn.ReLU()))
    for chain in (True, False):
        run = made(method, network if chain else nn.Sequential(*network, nn.Identity()), replicas=2, epochs=5, **given)
        assert (find_chain(run.network, task(0).x) is not None) == chain
        for number in range(2):
            run.learn([task(number)])
        ends.append(run.tensors())
    assert (ends[0]["film 0"][:, :, 0] - 1).abs().max() > 0.05
    for name, found in ends[0].items():
        torch.testing.assert_close(found, ends[1][name], rtol=1e-7, atol=1e-9, msg=name)


def test_rows_are_no_weights_of_the_posterior():
    """So no KL, penalty or Fisher can see them, and they have no standard deviation."""
    sizes = [made("evcl", film=film).network.posterior.log_std.shape for film in (True, False)]
    assert sizes[0] == sizes[1]


def test_replayed_examples_use_their_own_rows_which_stay():
    """Fits on examples of both tasks: the batch is a mixture, and only the new task's row moves."""

    def learn(memory, round_, s):
        fitted = yield Fit([*round_.tasks, *([task(0)] if round_.number else [])])
        return Learned(fitted.q, memory)

    run = made(Method("replays", "", bayesian=False, learn=learn), epochs=1, batch_size=48, lr=0.01)
    run.learn([task(0)])
    start, film = named(run, run.network.posterior.mean), run.network.task_weights.table.clone()
    run.learn([task(1)])
    assert torch.equal(run.network.task_weights.table[:, 0], film[:, 0])

    weights = {name: w.clone().requires_grad_() for name, w in start.items()}
    row = FIRST.repeat(1, 14).requires_grad_()
    for data, own in ((task(1), row), (task(0), film[0, 0])):
        (F.cross_entropy(said(weights, own, data.x[0]), data.y[0]) / 2).backward()
    for name, now in named(run, run.network.posterior.mean).items():  # Adam's first step is the gradient's sign
        torch.testing.assert_close(now - start[name], -0.01 * weights[name].grad.sign(), atol=2e-4, rtol=1e-3)
    moved = run.network.task_weights.table[0, 1] - FIRST
    wanted = -FILM_RATE_FACTOR * 0.01 / (2 / 8) ** 0.5 * row.grad / (row.grad.abs() + EPSILON)
    torch.testing.assert_close(moved, wanted)


def test_the_fisher_is_that_of_the_network_with_the_tasks_row():
    run, data = made("ewc"), task(1)
    for number in range(2):
        run.learn([task(number)])
    network, weights = run.network, named(run, run.network.posterior.mean)
    found, other = (
        curvature.fisher(curvature.Sample(network, network.posterior.mean, network.layout, [0], data.x, data.y, task=t))
        for t in (1, 0)
    )
    assert not torch.allclose(found, other, rtol=0.1)
    row, leaves = network.task_weights.table[0, 1], {name: w.requires_grad_() for name, w in weights.items()}
    total = small_runs.fisher_by_definition(leaves, lambda x: said(leaves, row, x), data.x[0])
    small_runs.assert_weights(run, found, {name: f / 24 for name, f in total.items()})


def test_distillation_uses_the_row_of_the_task_that_is_kept():
    """At the first step, the student is the teacher: whatever the new task's row is, there is nothing to correct."""
    run = made("lwf", heads=(3, 3), strength=1.0)
    run.learn([task(0)])
    values = []

    class Watch(evcl.training.Observer):
        def begin_fit(self, stage, step, stopped, epochs, batches):
            for row in (1.0, 3.0):  # the new task's
                step.task_fit.values[:] = row
                step.source(torch.arange(24).view(1, -1), GeneratorNoise([torch.Generator()]))
                values.append(float(step.losses_now()["distillation"]))
            step.task_fit.weights.table[:, 0] *= 1.1  # that of the task that is kept
            step.source(torch.arange(24).view(1, -1), GeneratorNoise([torch.Generator()]))
            values.append(float(step.losses_now()["distillation"]))

    run.learn([task(1, head=1)], observer=Watch())
    assert max(abs(value) for value in values[:2]) < 1e-12
    assert values[2] > 1e-6


# --- the learner -----------------------------------------------------------------------------------------------------


def rows_of(seed, shape=(4,)):
    """Classes that differ along a direction of the task's own."""
    source = np.random.default_rng(seed)
    y = np.arange(64) % 2
    direction = np.random.default_rng(seed + 50).normal(size=shape)
    x = source.normal(size=(64, *shape)) + 2 * (y.reshape(-1, *[1] * len(shape)) - 0.5) * direction
    return x.astype(np.float32), y


def test_a_task_is_predicted_with_its_own_row():
    one = evcl.Naive(evcl.nn.mlp(4, [8]), film=True, epochs=3)
    for name in ("a", "b"):
        one.learn(*rows_of(ord(name)), head="new" if name == "a" else "a", task=name)
    x = rows_of(9)[0]
    p = {name: one.predict_proba(x, name) for name in ("a", "b")}
    one.state.run.network.task_weights.table[:, 1] = 3.0
    assert np.array_equal(one.predict_proba(x, "a"), p["a"])
    assert np.array_equal(one.predictions(x, "a").probabilities, p["a"])
    assert not np.allclose(one.predict_proba(x, "b"), p["b"])
    with pytest.raises(evcl.EvclError, match=r"each task has scales and shifts .* choose a task, one of a, b"):
        one.predict(x)


def test_infer_chooses_among_tasks_that_share_a_head():
    one = evcl.Naive(evcl.nn.mlp(4, [8]), film=True, epochs=2)
    for name in ("a", "b"):
        one.learn(*rows_of(ord(name)), head="new" if name == "a" else "a", task=name)
    x = rows_of(98)[0]
    entropy = [-(p * np.log(p)).sum(1) for p in (one.predict_proba(x, name) for name in ("a", "b"))]
    wanted = np.where(entropy[0] <= entropy[1], "a", "b")
    assert set(wanted) == {"a", "b"}
    assert (one.predictions(x, "infer").tasks == wanted).all()


@pytest.mark.parametrize("name", ["mlp", "convolutions", "transformer"])
def test_the_mean_network_has_the_tasks_scales_and_shifts(name):
    one = evcl.Naive(plain(name), film=True, epochs=2)
    for k, t in enumerate("ab"):
        one.learn(*rows_of(k, (1, 6, 6)), task=t)
    x = torch.from_numpy(rows_of(3, (1, 6, 6))[0])
    for t in "ab":
        with torch.no_grad():
            torch.testing.assert_close(one.mean_network(t)(x).softmax(1), one.predict_proba(x, t), rtol=1e-4, atol=1e-5)


def test_joint_training_has_a_row_per_task():
    benchmark = evcl.benchmarks.get("permuted-digits", tasks=2)
    one = evcl.Learner(evcl.nn.mlp(64, [10]), "joint", film=True, epochs=1, batch_size=128)
    one.learn_jointly(benchmark)
    film = one.state.run.network.task_weights.table
    assert film.shape[1] == 2
    assert (film[:, 0] - film[:, 1]).abs().max() > 0.01
    p = [one.predict_proba(benchmark[0].test.x, t) for t in range(2)]
    assert not torch.allclose(*p, atol=0.1)


def test_what_cannot_have_film_is_refused():
    with pytest.raises(evcl.EvclError, match="film needs a linear layer or a convolution"):
        evcl.EVCL(nn.Sequential(nn.Flatten(), nn.LayerNorm(4)), film=True)
    with pytest.raises(evcl.EvclError, match="film must be true or false, not 'maybe'"):
        evcl.EVCL(evcl.nn.mlp(4, [3]), film="maybe")
    assert evcl.EVCL(evcl.nn.mlp(4, [3]), film="true").settings.film is True


def test_without_film_there_are_no_rows():
    one = evcl.Naive(evcl.nn.mlp(4, [8]), epochs=1)
    one.learn(*rows_of(0))
    assert one.state.run.network.task_weights is None
    assert not any("film" in name for name in one.state.run.tensors())
    assert METHODS["evcl-film"].known_settings["film"].default is True


def test_evcl_with_film_forgets_less_than_evcl():
    """Permuted digits: the tasks share a head, and differ in what the units should do."""
    benchmark = evcl.benchmarks.get("permuted-digits", tasks=3)
    final = {}
    for method in ("evcl", "evcl-film"):
        one = evcl.Learner(evcl.nn.mlp(64, [50]), method, epochs=8, one_softmax=True, posterior="diagonal")
        for each in benchmark:
            one.learn(each)
        final[method] = np.mean(list(one.evaluate(benchmark).values()))
    assert final["evcl-film"] > final["evcl"] + 0.03
