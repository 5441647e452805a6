"""Incremental moment matching: what predicts is the closed form; training is that of plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import skip_init

import evcl
from evcl._core.randomness import GeneratorNoise, generator
from evcl._core.settings import resolve
from evcl.methods import METHODS, TaskData, fisher
from evcl.methods.imm import SMALLEST, DropTransfer
from evcl.methods.method import Fitted, Round
from evcl.nn import Gaussian, Part
from evcl.training import Run, learn_stream

F64 = torch.float64
ROWS = 30
METHOD_NAMES = ("imm-mean", "imm-mode")


def data(k, head=None, rows=ROWS):
    x = torch.randn(1, rows, 5, generator=generator(0, "task", k), dtype=F64)
    return TaskData(x, (x[:, :, k] > 0).long(), k if head is None else head, task=k)


def made(method, replicas=1, hidden=(7,), **given):
    usual = {"epochs": 4, "batch_size": ROWS, "lr": 0.02, "lr_schedule": "constant"}
    s = resolve(method, METHODS[method].known_settings, {**usual, **given})
    run = Run(evcl.nn.mlp(5, list(hidden)), METHODS[method], [s] * replicas, range(replicas), draw=True, dtype=F64)
    run.add_heads(hidden[-1], [2, 2, 2])
    return run


def fishers(run, task):
    """The Fisher of a task at the run's weights by its definition: a gradient for every row and class, squared."""
    w = {name: view[0].clone() for name, view in run.network.layout.views(run.network.posterior.mean).items()}
    used = ["1.weight", "1.bias", f"head {task.head}.weight", f"head {task.head}.bias"]
    found = {name: torch.zeros_like(value) for name, value in w.items()}
    leaves = [w[name].requires_grad_() for name in used]
    for x in task.x[0]:
        hidden = torch.relu(leaves[0] @ x + leaves[1])
        log_p = (leaves[2] @ hidden + leaves[3]).log_softmax(0)
        for c in range(2):
            grads = torch.autograd.grad(log_p[c], leaves, retain_graph=True)
            for name, grad in zip(used, grads, strict=True):
                found[name] += log_p[c].exp().detach() * grad.square() / len(task.x[0])
    return found


def learned(method, tasks, replicas=1, **given):
    """The run, the weights mu_k that each task ended with, and the weights w_k, by name."""
    run, ends, weights = made(method, replicas, **given), [], []
    for task in tasks:
        run.learn([task])
        views = run.network.layout.views(run.network.posterior.mean)
        ends.append({name: view[0].clone() for name, view in views.items()})
        used = {name: name.startswith(("1", f"head {task.head}.")) for name in views}
        own = {name: torch.ones_like(view[0]) for name, view in views.items()}
        if method == "imm-mode":
            own = {name: fisher + SMALLEST for name, fisher in fishers(run, task).items()}
        weights.append({name: own[name] * used[name] for name in views})
    return run, ends, weights


PLAIN = {"fisher_temperature": 1.0, "fisher_spread": 0.0}


@pytest.mark.parametrize("heads", [(0, 1, 2), (0, 0, 0)])
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_what_predicts_is_the_closed_form_and_not_the_last_weights(method, heads):
    """The trunk is merged, and a head that tasks share; a head of one task is as its task left it."""
    tasks = [data(k, head) for k, head in enumerate(heads)]
    run, ends, weights = learned(method, tasks, **(PLAIN if method == "imm-mode" else {}))
    found = run.network.layout.views(run.predictor(0).mean)
    for name, view in found.items():
        total = sum(w[name] for w in weights)
        wanted = sum(w[name] * mu[name] for w, mu in zip(weights, ends, strict=True)) / total
        if not bool((total > 0).all()):
            wanted = ends[-1][name]  # a head that no task has used
        torch.testing.assert_close(view[0], wanted, rtol=1e-8, atol=1e-10)
        if name.startswith("head") and sum(name.startswith(f"head {k}.") for k in heads) == 1:
            torch.testing.assert_close(view[0], ends[heads.index(int(name[5]))][name], rtol=1e-10, atol=0)
    last = run.network.layout.views(run.network.posterior.mean)
    assert float((found["1.weight"] - last["1.weight"]).abs().max()) > 0.01
    mean = sum(mu["1.weight"] for mu in ends) / 3
    assert (float((found["1.weight"][0] - mean).abs().max()) > 0.01) == (method == "imm-mode")
    w = {name: view[0] for name, view in found.items()}
    for task in tasks:  # and these weights are what the network computes with
        z = torch.relu(task.x[0] @ w["1.weight"].T + w["1.bias"]) @ w[f"head {task.head}.weight"].T
        p = (z + w[f"head {task.head}.bias"]).softmax(1)
        torch.testing.assert_close(run.predict(task.x, task.head, task=task.task)[0], p)


def test_after_one_task_it_predicts_as_naive_training_does():
    for method in METHOD_NAMES:
        one, naive = made(method), made("naive")
        for run in (one, naive):
            run.learn([data(0)])
        torch.testing.assert_close(one.predict(data(0).x, 0), naive.predict(data(0).x, 0), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_what_is_stored_does_not_alias_the_live_weights(method):
    run = made(method)
    run.learn([data(0)])
    kept = {name: t.clone() for name, t in run.tensors().items() if name.startswith("memory/")}
    predicted = run.predictor(0).mean.clone()
    assert set(kept) == {"memory/weight", "memory/moment"}  # 2 P, however many tasks
    run.network.posterior.mean.add_(1)
    assert all(torch.equal(run.tensors()[name], t) for name, t in kept.items())
    used = kept["memory/weight"] > 0
    assert torch.equal(run.predictor(0).mean[used], predicted[used])


def test_the_importance_is_at_least_0_and_not_that_of_batches():
    """The same weights after training: the batch size of training plays no part in the Fisher."""
    run = made("imm-mode", epochs=1, lr=1e-12, **PLAIN)
    again = made("imm-mode", epochs=1, lr=1e-12, batch_size=3, **PLAIN)
    for one in (run, again):
        one.learn([data(0)])
    assert bool((run.memory.weight >= 0).all())
    torch.testing.assert_close(run.memory.weight, again.memory.weight, rtol=1e-6, atol=1e-14)
    assert float(run.memory.weight.max()) > 1e-4


def test_l2_transfer_is_that_of_plain_torch():
    """+ lam ||mu_k - mu_{k-1}||^2 without a half, from the second task on; a new head is not held."""
    run = made("imm-mean", l2_transfer=0.3)
    sizes = {"1": (5, 7), "head 0": (7, 2), "head 1": (7, 2), "head 2": (7, 2)}
    network = nn.ModuleDict({name: skip_init(nn.Linear, *size, dtype=F64) for name, size in sizes.items()})
    views = run.network.layout.views(run.network.posterior.mean)
    network.load_state_dict({name: view[0] for name, view in views.items()})
    for k in range(2):
        task = data(k)
        run.learn([task])
        held = {name: w.detach().clone() for name, w in network["1"].named_parameters()}
        used = [*network["1"].parameters(), *network[f"head {k}"].parameters()]
        adam = torch.optim.Adam(used, lr=0.02)
        for _ in range(4):
            adam.zero_grad()
            loss = F.cross_entropy(network[f"head {k}"](torch.relu(network["1"](task.x[0]))), task.y[0])
            if k:
                loss = loss + 0.3 * sum(((w - held[n]) ** 2).sum() for n, w in network["1"].named_parameters())
            loss.backward()
            adam.step()
    for name, view in run.network.layout.views(run.network.posterior.mean).items():
        torch.testing.assert_close(view[0], network.state_dict()[name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_a_stronger_l2_transfer_keeps_the_solutions_closer(method):
    far = []
    for strength in (0.0, 0.1, 10.0):
        _, ends, _ = learned(method, [data(0), data(1)], l2_transfer=strength, epochs=30)
        far.append(float((ends[1]["1.weight"] - ends[0]["1.weight"]).norm()))
    assert far[0] > 1.2 * far[1] > 1.2 * 1.2 * far[2] > 0


def test_drop_transfer_is_that_of_plain_torch():
    """mu + m (theta - mu), m of a unit shared by its weights and its bias; the gradient by autograd through it."""
    p, noise = 0.4, generator(3, "noise")
    run = made("imm-mean", hidden=(7, 6), drop_transfer=p, l2_transfer=0.0)
    run.learn([data(0)])
    names = ("1.weight", "1.bias", "3.weight", "3.bias", "head 1.weight", "head 1.bias")
    start = {name: run.network.layout.view(run.network.posterior.mean, name)[0].clone() for name in names}
    weights = {name: nn.Parameter(w.clone()) for name, w in start.items()}
    task = data(1)
    run.learn([task], noise=GeneratorNoise([generator(3, "noise")]))
    adam, dropped = torch.optim.Adam(weights.values(), lr=0.02), 0
    for _ in range(4):
        now = dict(weights)
        for layer, width in (("1", 7), ("3", 6)):
            keep = torch.empty(1, width, dtype=F64).uniform_(generator=noise)[0] >= p
            dropped += int((~keep).sum())
            m = keep.to(F64) / (1 - p)
            for name, factor in ((f"{layer}.weight", m.unsqueeze(1)), (f"{layer}.bias", m)):
                now[name] = start[name] + factor * (weights[name] - start[name])
        h = torch.relu(task.x[0] @ now["1.weight"].T + now["1.bias"])
        h = torch.relu(h @ now["3.weight"].T + now["3.bias"])
        adam.zero_grad()
        F.cross_entropy(h @ now["head 1.weight"].T + now["head 1.bias"], task.y[0]).backward()
        adam.step()
    assert 5 < dropped < 47
    for name, w in weights.items():
        view = run.network.layout.view(run.network.posterior.mean, name)[0]
        torch.testing.assert_close(view, w.detach(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", ["imm-mean", "imm-mode"])
def test_drop_transfer_beside_others_is_as_alone(method):
    """Other probabilities in one program; the noise of a replica is its own."""
    common = {"epochs": 3, "batch_size": 8, "lr": 0.02}
    known = METHODS[method].known_settings
    each = [resolve(method, known, {**common, "drop_transfer": p}) for p in (0.3, 0.6, 0.0)]

    def trained(rows):
        run = Run(evcl.nn.mlp(5, [7]), METHODS[method], [each[r] for r in rows], rows, draw=True, dtype=F64)
        run.add_heads(7, [2, 2])
        for k in range(2):
            run.learn([data(k)])
        return run

    together = trained(range(3))
    for r in range(3):
        alone = trained([r])
        torch.testing.assert_close(together.network.posterior.mean[r], alone.network.posterior.mean[0])
        torch.testing.assert_close(together.predictor(1).mean[r], alone.predictor(1).mean[0])


def test_a_tracker_that_perturbs_restores_the_weights():
    layout = made("imm-mean").network.layout
    q = Gaussian(torch.arange(float(layout.size), dtype=F64).unsqueeze(0), None, layout)
    drop = DropTransfer(0.5, [["1.weight", "1.bias"]])
    drop.begin(Gaussian(torch.zeros_like(q.mean), None, layout), Part(layout, layout))
    assert drop.perturbs
    before = q.mean.clone()
    drop.perturb(q, GeneratorNoise([generator(0, "noise")]))
    assert not torch.equal(q.mean, before)
    grads = evcl.methods.Gradients(torch.ones_like(before), None, layout)
    drop.before(q, grads)
    assert torch.equal(q.mean, before)
    assert set(grads.part("1.bias").flatten().tolist()) == {0.0, 2.0}
    assert bool((grads.part("head 0.weight") == 1).all())


def test_the_mode_of_a_weight_without_a_fisher_is_the_mean():
    network = made("imm-mode").network
    round_ = Round(0, [data(0)], network, network.posterior, [], [0], evcl.targets.CATEGORICAL)
    run = made("imm-mode", **PLAIN)
    layout = run.network.layout
    zero = Gaussian(torch.zeros_like(network.posterior.mean), None)
    fitted = Fitted(network, zero, zero, layout, torch.ones(layout.size, dtype=F64))
    s = resolve("ewc", METHODS["ewc"].known_settings, {**PLAIN, "fisher_scale": "none"})
    found = fisher(fitted, round_, s)
    assert not layout.view(found, "1.weight").any()  # of a network of zeros; so the weights of its mode are all e
    run.learn([data(0)])
    run.learn([data(1)])
    dead = run.memory.weight <= 2 * SMALLEST
    assert torch.allclose(run.memory.weight[dead & (run.memory.weight > 0)], torch.tensor(SMALLEST, dtype=F64), rtol=1)


@pytest.mark.full
def test_merging_forgets_less_than_naive_training():
    """Four permuted tasks, two seeds: far above naive training; the Fisher helps."""
    final = {}
    for method in ("naive", *METHOD_NAMES):
        s = resolve(method, METHODS[method].known_settings, {"epochs": 20})
        run = Run(evcl.nn.mlp(64, [100, 100]), METHODS[method], [s] * 2, range(2), draw=True)
        streams = [evcl.benchmarks.get("permuted-digits", seed, 4) for seed in range(2)]
        final[method] = float(learn_stream(run, streams).accuracy[:, -1].mean())
    assert final["imm-mean"] > final["naive"] + 0.03
    assert final["imm-mode"] > final["imm-mean"] + 0.03


@pytest.mark.parametrize("setting", [{"l2_transfer": -1}, {"drop_transfer": 1.0}])
def test_settings_out_of_bounds_are_refused(setting):
    with pytest.raises(evcl.EvclError, match=next(iter(setting))):
        evcl.Learner(evcl.nn.mlp(3, [3]), "imm-mean", **setting)
