"""Incremental moment matching: what predicts is the closed form; training is that of plain torch."""

from __future__ import annotations

import pytest
import small_runs
import torch
import torch.nn.functional as F
from small_runs import F64, PLAIN_FISHER, adam, assert_weights, by_sign, copies, learned, logits, plain, run_of, used_by

from evcl._core.randomness import GeneratorNoise, generator
from evcl.methods.imm import SMALLEST

HEADS = (2, 2, 2)
METHOD_NAMES = ("imm-mean", "imm-mode")


@pytest.mark.parametrize("heads", [(0, 1, 2), (0, 0, 0)])
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_what_predicts_is_the_closed_form_and_not_the_last_weights(method, heads):
    """The trunk is merged, and a head that tasks share; a head of one task is as its task left it."""
    tasks = [by_sign(k, head) for k, head in enumerate(heads)]
    run, ends, weights = run_of(method, heads=HEADS, **(PLAIN_FISHER if method == "imm-mode" else {})), [], []
    for task in tasks:
        run.learn([task])
        network = plain(run)
        used = used_by(network, task.head)
        own = {name: torch.ones_like(w) for name, w in used.items()}
        if method == "imm-mode":
            own = small_runs.fisher_by_definition(used, lambda x, n=network, k=task.head: logits(n, x, k), task.x[0])
            own = {name: total / task.n + SMALLEST for name, total in own.items()}
        ends.append(copies(dict(network.named_parameters())))
        weights.append({name: own.get(name, torch.zeros_like(w)) for name, w in ends[-1].items()})
    found, last = small_runs.named(run, run.predictor(0).mean), ends[-1]
    for name, view in found.items():
        total = sum(w[name] for w in weights)
        wanted = sum(w[name] * mu[name] for w, mu in zip(weights, ends, strict=True)) / total
        used = bool((total > 0).all())  # or else a head that no task has used
        torch.testing.assert_close(view, wanted if used else last[name], rtol=1e-8, atol=1e-10)
        if name.startswith("head") and sum(name.startswith(f"head {k}.") for k in heads) == 1:
            torch.testing.assert_close(view, ends[heads.index(int(name[5]))][name], rtol=1e-10, atol=0)
    assert float((found["1.weight"] - last["1.weight"]).abs().max()) > 0.01
    mean = sum(mu["1.weight"] for mu in ends) / 3
    assert (float((found["1.weight"] - mean).abs().max()) > 0.01) == (method == "imm-mode")
    network.load_state_dict(found)
    for task in tasks:  # and these weights are what the network computes with
        p = logits(network, task.x[0], task.head).softmax(1).detach()
        torch.testing.assert_close(run.predict(task.x, task.head, task=task.task)[0], p)


def test_after_one_task_it_predicts_as_naive_training_does():
    one = by_sign(0)
    wanted = learned("naive", [one]).predict(one.x, 0)
    for method in METHOD_NAMES:
        torch.testing.assert_close(learned(method, [one]).predict(one.x, 0), wanted, rtol=1e-10, atol=1e-12)


def test_l2_transfer_is_that_of_plain_torch():
    """+ lam ||mu_k - mu_{k-1}||^2 without a half, from the second task on; a new head is not held."""
    run = run_of("imm-mean", l2_transfer=0.3)
    network = plain(run)
    for k in range(2):
        task, held = by_sign(k, k), copies(dict(network["1"].named_parameters()))

        def loss(k=k, task=task, held=held):
            away = sum(((w - held[n]) ** 2).sum() for n, w in network["1"].named_parameters())
            return F.cross_entropy(logits(network, task.x[0], k), task.y[0]) + 0.3 * bool(k) * away

        adam(used_by(network, k), loss)
        run.learn([task])
    assert_weights(run, run.network.posterior.mean, dict(network.named_parameters()))


def test_drop_transfer_is_that_of_plain_torch():
    """mu + m (theta - mu), m of a unit shared by its weights and its bias; the gradient by autograd through it."""
    p, noise = 0.4, generator(3, "noise")
    run = run_of("imm-mean", hidden=(7, 6), drop_transfer=p, l2_transfer=0.0)
    run.learn([by_sign(0)])
    network, task = plain(run), by_sign(1, 1)
    start, dropped = copies(dict(network.named_parameters())), []

    def loss():
        now = dict(network.named_parameters())
        for layer, width in (("1", 7), ("3", 6)):
            keep = torch.empty(1, width, dtype=F64).uniform_(generator=noise)[0] >= p
            dropped.append(int((~keep).sum()))
            m = keep.to(F64) / (1 - p)
            for name, factor in ((f"{layer}.weight", m.unsqueeze(1)), (f"{layer}.bias", m)):
                now[name] = start[name] + factor * (now[name] - start[name])
        h = torch.relu(task.x[0] @ now["1.weight"].T + now["1.bias"])
        h = torch.relu(h @ now["3.weight"].T + now["3.bias"])
        return F.cross_entropy(h @ now["head 1.weight"].T + now["head 1.bias"], task.y[0])

    adam(used_by(network, 1), loss)
    run.learn([task], noise=GeneratorNoise([generator(3, "noise")]))
    assert 5 < sum(dropped) < 47
    assert_weights(run, run.network.posterior.mean, dict(network.named_parameters()))
