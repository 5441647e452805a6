"""Context-dependent gating: training and Fisher by plain torch, gates on any network, and what it is for."""

from __future__ import annotations

from functools import partial

import pytest
import small_runs
import torch
import torch.nn.functional as F
from small_runs import F64, PLAIN_FISHER, adam, assert_weights, by_sign, copies, fisher_by_definition, learned, plain
from torch import nn

import evcl
from evcl._core.randomness import generator
from evcl.methods.xdg import widths

PLAIN = {**PLAIN_FISHER, "fisher_scale": "none"}
made = partial(small_runs.run_of, "xdg", hidden=(7, 6))


def gates_of(run, task, r=0):
    """By name, [inputs] each."""
    sizes = list(widths(run.network.layout))
    parts = run.memory.gates[task][r].to(F64).split([width for _, width in sizes])
    return dict(zip([name for name, _ in sizes], parts, strict=True))


def say(network, gates, x, head):
    """A unit's output times its gate."""
    first = gates["3.weight"] * torch.relu(network["1"](x))
    return network[f"head {head}"](gates["heads"] * torch.relu(network["3"](first)))


@pytest.mark.parametrize("importance", ["none", "fisher"])
@pytest.mark.parametrize("heads", [(0, 0, 0), (0, 1, 0)])
def test_it_trains_as_plain_torch_does(importance, heads):
    """Gates on the units' outputs, Adam, and a Fisher of the gated network, a gradient for every row and class."""
    run = made(strength=20.0, importance=importance, **PLAIN)
    network = plain(run)
    weights = dict(network.named_parameters())
    fisher = {name: torch.zeros_like(value) for name, value in weights.items()}
    for k, head in enumerate(heads):
        task = by_sign(k, head)
        run.learn([task])
        gates, used = gates_of(run, k), small_runs.used_by(network, head)
        assert 0 < float(gates["3.weight"].sum()) < 7
        anchor = copies(used)

        def loss(task=task, gates=gates, used=used, anchor=anchor):
            held = sum((fisher[name] * (w - anchor[name]).square()).sum() for name, w in used.items())
            return F.cross_entropy(say(network, gates, task.x[0], task.head), task.y[0]) + 10 * held

        adam(used, loss)
        if importance == "fisher":
            found = fisher_by_definition(used, lambda x, g=gates, h=head: say(network, g, x, h), task.x[0])
            for name, more in found.items():
                fisher[name] += more / task.n
        assert_weights(run, run.network.posterior.mean, weights)
        assert_weights(run, run.memory.base.importance, fisher, atol=1e-12)
    for k, head in enumerate(heads):  # each task is predicted through its own gates
        p = say(network, gates_of(run, k), by_sign(k).x[0], head).softmax(1).detach()
        torch.testing.assert_close(run.predict(by_sign(k).x, head, task=k)[0], p)


def test_gates_are_drawn_once_per_task_from_the_seed():
    both, alone = (
        learned("xdg", [by_sign(0), by_sign(1)], hidden=(7, 6), seeds=seeds, gated=0.4).memory.gates
        for seeds in ([3, 4], [4])
    )
    assert torch.equal(both[0][1:], alone[0])
    assert torch.equal(both[1][1:], alone[1])
    assert not torch.equal(both[0][0], both[0][1])
    assert not torch.equal(both[0], both[1])
    inputs, first, second = both[0].split([5, 7, 6], 1)
    assert bool((inputs == 1).all())  # the network's own inputs have no gates
    assert first.sum(1).tolist() == [5, 5]  # 0.6 of 7 rounded up
    assert second.sum(1).tolist() == [4, 4]
    assert both[0].dtype == torch.uint8


@pytest.mark.parametrize(("importance", "other"), [("none", "naive"), ("fisher", "ewc")])
def test_without_gates_it_is_naive_training_or_ewc(importance, other):
    given = {**PLAIN, "strength": 7.0} if other == "ewc" else {}
    tasks = [by_sign(0), by_sign(1)]
    one = learned("xdg", tasks, hidden=(7, 6), gated=0.0, importance=importance, **given)
    two = learned(other, tasks, hidden=(7, 6), **given)
    torch.testing.assert_close(one.network.posterior.mean, two.network.posterior.mean, rtol=1e-9, atol=1e-12)


class Odd(nn.Module):
    """A convolution, a batch norm, an activation that is not 0 at 0, groups, a layer norm, a residual connection."""

    def __init__(self):
        super().__init__()
        source = generator(0, "odd")
        skip = nn.utils.skip_init
        self.first, self.norm = skip(nn.Conv2d, 1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second = skip(nn.Conv2d, 4, 6, 2, groups=2)
        self.third, self.layer_norm = skip(nn.Linear, 6 * 9, 8), nn.LayerNorm(8)
        self.fourth = skip(nn.Linear, 8, 8)
        for p in self.parameters():
            p.data.copy_(torch.randn(p.shape, generator=source) / 2)

    def forward(self, x):
        h = torch.sigmoid(self.norm(self.first(x.view(-1, 1, 4, 4))))
        h = torch.tanh(self.second(h)).flatten(1)
        h = torch.sigmoid(self.layer_norm(self.third(h)))
        return h + F.gelu(self.fourth(h))


def test_gates_close_the_units_of_any_network():
    """Each layer reads its input times the gates; the convolution with two groups has one set for both."""
    run = made(network=Odd(), features=8, seeds=[0, 1], gated=0.5)
    tasks = [by_sign(k, inputs=16) for k in range(2)]
    for task in tasks:
        run.learn([task])
    assert [name for name, _ in widths(run.network.layout)] == [
        "first.weight", "second.weight", "third.weight", "fourth.weight", "heads",
    ]  # fmt: skip
    for r in range(2):
        plain = Odd().to(F64).eval()
        views = run.network.layout.views(run.network.posterior.mean)
        plain.load_state_dict({name: v[r] for name, v in views.items() if not name.startswith("head")}, strict=False)
        for key, value in run.network.statistics().items():
            plain.get_buffer(key).copy_(value[r])
        for k, task in enumerate(tasks):
            gates = gates_of(run, k, r)
            assert bool(gates["first.weight"].all())
            assert gates["second.weight"].sum() == 1
            assert gates["third.weight"].sum() == 27
            shapes = {"second": gates["second.weight"].repeat(2).view(1, 4, 1, 1)}
            shapes |= {name: gates[f"{name}.weight"] for name in ("third", "fourth")}
            handles = [
                getattr(plain, name).register_forward_pre_hook(lambda _, args, g=gate: (args[0] * g,))
                for name, gate in shapes.items()
            ]
            features = plain(task.x[0]) * gates["heads"]
            for handle in handles:
                handle.remove()
            z = features @ views["head 0.weight"][r].T + views["head 0.bias"][r]
            torch.testing.assert_close(run.predict(task.x, 0, task=k)[r], z.softmax(1))


def test_predictions_use_the_gates_of_the_task_that_is_named():
    learner = evcl.Learner(evcl.nn.mlp(64, [20]), "xdg", epochs=2)
    benchmark = evcl.benchmarks.get("permuted-digits", tasks=2)
    for task in benchmark:
        learner.learn(task, head=0 if learner.tasks else "new")
    x = benchmark[0].test.x[:20]
    first, second = (learner.predict_proba(x, task=task.name) for task in benchmark)
    assert not torch.allclose(first, second, atol=1e-2)
    assert torch.equal(learner.predict_proba(x, task=0), first)
    assert torch.equal(learner.predict_proba(x), second)


def test_a_network_without_hidden_units_is_refused():
    learner = evcl.Learner(nn.Flatten(), "xdg", epochs=2)
    with pytest.raises(evcl.EvclError, match="closes hidden units"):
        learner.learn(evcl.benchmarks.get("split-digits", tasks=1)[0])
    assert learner.tasks == ()
