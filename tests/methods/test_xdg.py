"""Context-dependent gating: training and Fisher by plain torch, gates on any network, and what it is for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evcl
from evcl._core.randomness import generator
from evcl._core.settings import resolve
from evcl.methods import METHODS, TaskData
from evcl.methods.xdg import spread, widths
from evcl.training import Run, learn_stream

F64 = torch.float64
ROWS = 30
PLAIN = {"fisher_temperature": 1.0, "fisher_spread": 0.0, "fisher_scale": "none"}


def data(k, head=0, inputs=5):
    x = torch.randn(1, ROWS, inputs, generator=generator(0, "task", k), dtype=F64)
    return TaskData(x, (x[:, :, k] > 0).long(), head, task=k)


def made(method="xdg", replicas=1, network=None, features=6, seeds=None, heads=2, **given):
    usual = {"epochs": 4, "batch_size": ROWS, "lr": 0.02, "lr_schedule": "constant"}
    s = resolve(method, METHODS[method].known_settings, {**usual, **given})
    trunk = evcl.nn.mlp(5, [7, features]) if network is None else network
    seeds = range(replicas) if seeds is None else seeds
    run = Run(trunk, METHODS[method], [s] * len(seeds), seeds, draw=True, dtype=F64)
    run.add_heads(features, [2] * heads)
    return run


def gates_of(run, task, r=0):
    """By name, [inputs] each."""
    sizes = list(widths(run.network.layout))
    parts = run.memory.gates[task][r].to(F64).split([width for _, width in sizes])
    return dict(zip([name for name, _ in sizes], parts, strict=True))


def say(w, gates, x, head):
    """A unit's output times its gate."""
    first = gates["3.weight"] * torch.relu(x @ w["1.weight"].T + w["1.bias"])
    second = gates["heads"] * torch.relu(first @ w["3.weight"].T + w["3.bias"])
    return second @ w[f"head {head}.weight"].T + w[f"head {head}.bias"]


@pytest.mark.parametrize("importance", ["none", "fisher"])
@pytest.mark.parametrize("heads", [(0, 0, 0), (0, 1, 0)])
def test_it_trains_as_plain_torch_does(importance, heads):
    """Gates on the units' outputs, Adam, and a Fisher of the gated network, a gradient for every row and class."""
    run = made(strength=20.0, importance=importance, **PLAIN)
    w = {name: v[0].clone() for name, v in run.network.layout.views(run.network.posterior.mean).items()}
    fisher = {name: torch.zeros_like(value) for name, value in w.items()}
    for k, head in enumerate(heads):
        task = data(k, head)
        run.learn([task])
        gates = gates_of(run, k)
        assert 0 < float(gates["3.weight"].sum()) < 7
        used = [name for name in w if not name.startswith("head") or name.startswith(f"head {head}.")]
        leaves = {name: nn.Parameter(w[name].clone()) for name in used}
        anchor = {name: w[name].clone() for name in used}
        adam = torch.optim.Adam(leaves.values(), lr=0.02)
        for _ in range(4):
            adam.zero_grad()
            loss = F.cross_entropy(say(leaves, gates, task.x[0], head), task.y[0])
            for name in used:
                loss = loss + 10 * (fisher[name] * (leaves[name] - anchor[name]).square()).sum()
            loss.backward()
            adam.step()
        w |= {name: leaf.detach().clone() for name, leaf in leaves.items()}
        if importance == "fisher":
            for x in task.x[0]:
                log_p = say(leaves, gates, x, head).log_softmax(0)
                for c in range(2):
                    grads = torch.autograd.grad(log_p[c], list(leaves.values()), retain_graph=True)
                    for name, grad in zip(used, grads, strict=True):
                        fisher[name] += log_p[c].exp().detach() * grad.square() / ROWS
        for name, view in run.network.layout.views(run.network.posterior.mean).items():
            torch.testing.assert_close(view[0], w[name], rtol=1e-7, atol=1e-9)
        for name, view in run.network.layout.views(run.memory.base.importance).items():
            torch.testing.assert_close(view[0], fisher[name], rtol=1e-7, atol=1e-12)
    for k, head in enumerate(heads):  # each task is predicted through its own gates
        p = say(w, gates_of(run, k), data(k).x[0], head).softmax(1)
        torch.testing.assert_close(run.predict(data(k).x, head, task=k)[0], p)


def test_gates_are_drawn_once_per_task_from_the_seed():
    found = []
    for seeds in ([3, 4], [4]):
        run = made(seeds=seeds, gated=0.4)
        for k in range(2):
            run.learn([data(k)])
        found.append(run.memory.gates)
    both, alone = found
    assert torch.equal(both[0][1:], alone[0])
    assert torch.equal(both[1][1:], alone[1])
    assert not torch.equal(both[0][0], both[0][1])
    assert not torch.equal(both[0], both[1])
    inputs, first, second = both[0].split([5, 7, 6], 1)
    assert bool((inputs == 1).all())  # the network's own inputs have no gates
    assert first.sum(1).tolist() == [5, 5]  # 0.6 of 7 rounded up
    assert second.sum(1).tolist() == [4, 4]
    assert both[0].dtype == torch.uint8


def test_the_weights_of_closed_units_do_not_move():
    run = made(gated=0.5, importance="none")
    run.learn([data(0)])
    before = {name: v[0].clone() for name, v in run.network.layout.views(run.network.posterior.mean).items()}
    run.learn([data(1)])
    after = {name: v[0] for name, v in run.network.layout.views(run.network.posterior.mean).items()}
    gates = gates_of(run, 1)
    for into, bias, out, gate in (
        ("1.weight", "1.bias", "3.weight", gates["3.weight"]),
        ("3.weight", "3.bias", "head 0.weight", gates["heads"]),
    ):
        closed = gate == 0
        assert torch.equal(after[into][closed], before[into][closed])
        assert torch.equal(after[bias][closed], before[bias][closed])
        assert torch.equal(after[out][:, closed], before[out][:, closed])
        assert float((after[bias][~closed] - before[bias][~closed]).abs().max()) > 1e-3


@pytest.mark.parametrize(("importance", "other"), [("none", "naive"), ("fisher", "ewc")])
def test_without_gates_it_is_naive_training_or_ewc(importance, other):
    given = {**PLAIN, "strength": 7.0} if other == "ewc" else {}
    one, two = made(gated=0.0, importance=importance, **given), made(other, **given)
    for run in (one, two):
        for k in range(2):
            run.learn([data(k)])
    torch.testing.assert_close(one.network.posterior.mean, two.network.posterior.mean, rtol=1e-9, atol=1e-12)


def test_two_strengths_end_at_different_weights():
    ends = []
    for strength in (0.0, 1.0, 100.0):
        run = made(strength=strength)
        for k in range(2):
            run.learn([data(k)])
        ends.append(run.network.posterior.mean)
    assert all(float((ends[a] - ends[b]).abs().max()) > 1e-3 for a, b in ((0, 1), (1, 2), (0, 2)))


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
    tasks = [data(k, inputs=16) for k in range(2)]
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


def test_the_mask_covers_the_columns_of_closed_inputs():
    run = made()
    layout = run.network.layout
    gates = torch.ones(1, 5 + 7 + 6, dtype=torch.uint8)
    gates[0, [5 + 2, 5 + 7 + 1]] = 0
    views = layout.views(spread(gates, layout, run.network.posterior.mean))
    assert views["3.weight"].sum() == 6 * 6
    assert not views["3.weight"][0, :, 2].any()
    assert not views["head 1.weight"][0, :, 1].any()
    assert all(bool(views[name].all()) for name in ("1.weight", "1.bias", "3.bias", "head 0.bias"))


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


@pytest.mark.full
def test_gates_and_the_fisher_together_forget_least():
    """Four permuted tasks, two seeds."""
    final = {}
    for name, method, given in (
        ("naive", "naive", {}),
        ("gates", "xdg", {"importance": "none"}),
        ("fisher", "xdg", {"gated": 0.0}),
        ("both", "xdg", {}),
    ):
        s = resolve(method, METHODS[method].known_settings, {"epochs": 10, **given})
        run = Run(evcl.nn.mlp(64, [100]), METHODS[method], [s] * 2, range(2), draw=True)
        streams = [evcl.benchmarks.get("permuted-digits", seed, 4) for seed in range(2)]
        final[name] = float(learn_stream(run, streams).accuracy[:, -1].mean())
    assert final["both"] > max(final["gates"], final["fisher"]) + 0.02
    assert final["gates"] > final["naive"] + 0.05


@pytest.mark.parametrize("setting", [{"gated": 1.0}, {"importance": "guess"}])
def test_settings_out_of_bounds_are_refused(setting):
    with pytest.raises(evcl.EvclError, match=next(iter(setting))):
        evcl.Learner(evcl.nn.mlp(3, [3]), "xdg", **setting)
