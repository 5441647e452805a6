"""Adam and SGD: torch's own are the reference, for the rules alone and for whole runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checks import run_of as run_with
from interrupted import assert_stopped_run_ends_the_same
from torch import nn
from torch.nn.utils import skip_init

import evcl
from evcl._core.randomness import GeneratorNoise
from evcl.experiments import configure
from evcl.methods import TaskData
from evcl.training.rules import SGD, Adam

F64 = torch.float64


def tasks(generator, count=2, rows=23):
    x = torch.randn(count, 1, rows, 5, generator=generator, dtype=F64)
    return [TaskData(part, (part[:, :, k] > 0).long(), k, task=k) for k, part in enumerate(x)]


def to(task, dtype):
    return TaskData(task.x.to(dtype), task.y, task.head, task=task.task)


def run_of(method, replicas=1, dtype=F64, each=({},), **given):
    usual = {"epochs": 3, "batch_size": 8, "optimizer": "sgd", "lr": 0.05, **given}
    each = [{**usual, **one} for one in each] * (replicas // len(each))
    return run_with(method, evcl.nn.mlp(5, [7]), each, range(replicas), (7, [2, 2]), dtype=dtype)


@pytest.mark.parametrize("rule", ["adam", "sgd", "momentum"])
def test_it_is_torchs_with_a_rate_a_replica(rule, generator):
    momentum = 0.9 if rule == "momentum" else 0.0
    start = torch.randn(3, 20, generator=generator, dtype=F64)
    grads = torch.randn(30, 3, 20, generator=generator, dtype=F64)
    grads[:, :, 0] = 0
    rates = [1e-3, 1e-2, 0.3]
    for lr in (torch.tensor(rates, dtype=F64).unsqueeze(1), 0.01):
        ours = start.clone()
        made = Adam(ours, lr) if rule == "adam" else SGD(ours, lr, momentum)
        for grad in grads:
            made.step(grad, torch.empty_like(grad))
        for r in range(3):
            theirs, own = nn.Parameter(start[r].clone()), rates[r] if isinstance(lr, torch.Tensor) else lr
            optimiser = torch.optim.SGD([theirs], own, momentum)
            if rule == "adam":
                optimiser = torch.optim.Adam([theirs], own)
            for grad in grads:
                theirs.grad = grad[r].clone()
                optimiser.step()
            torch.testing.assert_close(ours[r], theirs.detach(), rtol=1e-12, atol=1e-14)
        assert torch.equal(ours[:, 0], start[:, 0])  # no gradient, no move
    assert rule == "adam" or len(made.state()) == (3 if momentum else 2)


def changed(*args, **kwargs):
    raise TypeError("_fused_adam_() got an unexpected keyword argument 'lr'")


@pytest.mark.parametrize("instead", [None, changed])
def test_a_torch_without_its_private_kernel_gives_the_same_numbers(instead, generator, monkeypatch):
    grads = torch.randn(30, 3, 20, generator=generator, dtype=F64)

    def moved():
        adam = Adam(torch.ones(3, 20, dtype=F64), 0.01)
        for grad in grads:
            adam.step(grad, torch.empty_like(grad))
        return adam.state()

    fused = moved()
    monkeypatch.delattr(torch, "_fused_adam_")
    if instead is not None:
        monkeypatch.setattr(torch, "_fused_adam_", instead, raising=False)
    for ours, theirs in zip(moved(), fused, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rule", ["adam", "sgd", "momentum"])
@pytest.mark.parametrize("dtype", [torch.float32, F64])  # native.c where there is one, and plain operations
def test_naive_training_is_that_of_torch(rule, dtype, generator):
    """Whole batches, at a constant rate and along a cosine; torch's optimiser starts anew for each task."""
    data, momentum = [to(task, dtype) for task in tasks(generator)], 0.9 if rule == "momentum" else 0.0
    close = {"rtol": 1e-7, "atol": 1e-9} if dtype is F64 else {"rtol": 1e-4, "atol": 1e-5}
    for schedule in ("constant", "cosine"):
        given = {"batch_size": 23, "epochs": 5, "lr_schedule": schedule, "momentum": momentum}
        run = run_of("naive", dtype=dtype, **given, optimizer="adam" if rule == "adam" else "sgd")
        sizes = {"1": (5, 7), "head 0": (7, 2), "head 1": (7, 2)}
        network = nn.ModuleDict({name: skip_init(nn.Linear, *size, dtype=dtype) for name, size in sizes.items()})
        views = run.network.layout.views(run.network.posterior.mean)
        network.load_state_dict({name: view[0] for name, view in views.items()})
        for task in data:
            run.learn([task])
            used = [*network["1"].parameters(), *network[f"head {task.head}"].parameters()]
            optimiser = torch.optim.SGD(used, lr=0.05, momentum=momentum)
            if rule == "adam":
                optimiser = torch.optim.Adam(used, lr=0.05)
            falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 5)
            for _ in range(5):
                optimiser.zero_grad()
                z = network[f"head {task.head}"](torch.relu(network["1"](task.x[0])))
                F.cross_entropy(z, task.y[0]).backward()
                optimiser.step()
                if schedule == "cosine":
                    falling.step()
        for name, view in run.network.layout.views(run.network.posterior.mean).items():
            torch.testing.assert_close(view[0], network.state_dict()[name], **close)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(("method", "rounds"), [("ewc", 2), ("vcl", 1)])
def test_springs_are_what_autograd_makes_of_the_terms(method, rounds, dtype):
    """float32 would take the compiled update of Adam, if it were Adam."""
    found = {}
    for name, reference in ((method, False), (method, True), ("naive", False)):
        more = {"tempering": 5.0, "std_update": "adam", "std_lr_scale": 0.1} if name == "vcl" else {}
        run = run_of(name, dtype=dtype, momentum=0.5, **more)
        for task in tasks(torch.Generator().manual_seed(0))[:rounds]:
            noise = GeneratorNoise([torch.Generator().manual_seed(1)])
            run.learn([to(task, dtype)], noise=noise, reference=reference)
        found[name, reference] = run.network.posterior.mean
    tolerance = 1e-9 if dtype is F64 else 1e-4
    torch.testing.assert_close(found[method, False], found[method, True], rtol=tolerance, atol=tolerance)
    assert float((found["naive", False] - found[method, False]).abs().max()) > 1e-3


def test_replicas_with_their_own_momentum_end_as_alone(generator):
    data, each = tasks(generator), [{"momentum": m, "lr": lr} for m, lr in ((0.0, 0.1), (0.5, 0.05), (0.9, 0.01))]
    beside = run_of("ewc", replicas=3, each=each)
    for task in data:
        beside.learn([task])
    for r, one in enumerate(each):
        usual = {"epochs": 3, "batch_size": 8, "optimizer": "sgd"}
        alone = run_with("ewc", evcl.nn.mlp(5, [7]), {**usual, **one}, [r], (7, [2, 2]), dtype=F64)
        for task in data:
            alone.learn([task])
        torch.testing.assert_close(
            beside.network.posterior.mean[r], alone.network.posterior.mean[0], rtol=1e-9, atol=1e-12
        )


def test_a_stopped_run_goes_on_with_its_velocity(tmp_path):
    given = {"epochs": 2, "batch_size": 40, "optimizer": "sgd", "momentum": 0.9, "lr": "auto"}
    config = configure("split-digits", "ewc", "default", (0, 1), 2, given)
    assert_stopped_run_ends_the_same(config, tmp_path)


@pytest.mark.parametrize("method", ["naive", "ewc", "evcl", "vcl"])
def test_the_default_rate_learns(method):
    for momentum in (0.0, 0.9):
        task = evcl.benchmarks.get("split-digits", tasks=1)[0]
        learner = evcl.Learner(evcl.nn.mlp(64, [50]), method, optimizer="sgd", momentum=momentum, epochs=20)
        learner.learn(task)
        assert learner.evaluate([task])[task.name] > 0.97


@pytest.mark.parametrize("given", [{"optimizer": "lbfgs"}, {"momentum": 1.0}, {"momentum": -0.1}])
def test_settings_out_of_bounds_are_refused(given):
    with pytest.raises(evcl.EvclError, match=next(iter(given))):
        evcl.Learner(evcl.nn.mlp(3, [3]), "naive", **given)
