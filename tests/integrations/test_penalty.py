"""A method's penalty in a loop that is not evcl's."""

from __future__ import annotations

import copy
import importlib
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.utils.data import Dataset, TensorDataset

import evcl
from evcl.integrations import Penalty
from evcl.methods import METHODS

ACCEPTED = ("evcl", "evcl-paper", "ewc", "ewc-offline", "gvcl", "kfac-evcl", "kfac-ewc", "mas", "vcl")
TASKS = evcl.benchmarks.get("permuted-digits", tasks=2)


def network(dtype=torch.float32, outputs=10):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, outputs)).to(dtype)


def rows(task, count=200, dtype=torch.float32):
    return task.train.x[:count].to(dtype), task.train.y[:count]


def train(module, penalty, x, y, epochs=5, lr=3e-3, gradient=False):
    """A loop as anyone writes it."""
    optimizer = torch.optim.Adam(module.parameters(), lr)
    module.train()
    if penalty is not None:
        penalty.begin((x, y))
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(50):
            optimizer.zero_grad()
            loss = F.cross_entropy(module(x[batch]), y[batch])
            if penalty is not None and not gradient:
                loss = loss + penalty()
            loss.backward()
            if gradient:
                penalty.add_gradient()
            optimizer.step()
    if penalty is not None:
        penalty.end()
    return module.eval()


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def two_tasks(method, **settings):
    module = network()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        penalty = None if method is None else Penalty(module, method, **settings)
        first = flat(train(module, penalty, *rows(TASKS[0])))
        train(module, penalty, *rows(TASKS[1]))
    return module, first


def test_the_term_of_ewc_is_that_of_the_paper():
    """strength / 2 n_1 / n_2 sum F (theta - theta*)^2, with the Fisher of each example and class, one at a time."""
    module = network(torch.float64)
    penalty = Penalty(module, "ewc", strength=2.0, fisher_temperature=1.0, fisher_spread=0.0)
    x, y = rows(TASKS[0], 30, torch.float64)
    assert penalty().item() == 0
    with penalty.task((x, y)):
        assert penalty().item() == 0
    anchor, fisher = flat(module).clone(), torch.zeros(flat(module).shape, dtype=torch.float64)
    for one in x:
        for c in range(10):
            log_p = module(one).log_softmax(0)
            grads = torch.autograd.grad(log_p[c], list(module.parameters()))
            fisher += log_p[c].exp().detach() * torch.cat([g.flatten() for g in grads]).square() / len(x)
    penalty.begin(rows(TASKS[1], 60, torch.float64))
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.ones_like(p))
    wanted = 2.0 / 2 * 30 / 60 * (fisher * (flat(module) - anchor).square()).sum()
    torch.testing.assert_close(penalty().detach(), wanted)


def test_the_terms_of_vcl_and_evcl_are_those_of_a_gaussian():
    """beta / n KL(q || prior), by torch's own KL; EVCL adds the elastic term, which is 0 in the first task."""
    for method in ("vcl", "evcl"):
        module = network(torch.float64)
        penalty = Penalty(module, method, tempering=0.5, prior_std=0.3, init_std=0.01)
        penalty.begin(rows(TASKS[0], 40, torch.float64))
        named = dict(module.named_parameters())
        total = 0.0
        for name, mean in named.items():
            if name.endswith("original"):
                std = named[name.replace("original", "0.log_std")].exp()
                assert bool((std - 0.01).abs().max() < 1e-12)
                total += kl_divergence(Normal(mean, std), Normal(torch.zeros_like(mean), 0.3)).sum().item()
        assert penalty().item() == pytest.approx(0.5 / 40 * total)


def test_the_fisher_is_that_of_a_learner_with_the_same_weights():
    learner = evcl.EWC(evcl.nn.mlp(64, [12]), epochs=2)
    learner.learn(TASKS[0])
    module = learner.mean_network()
    penalty = Penalty(module, "ewc")
    with penalty.task(tuple(TASKS[0].train)):
        pass
    theirs, ours = learner.state.run.memory.importance, penalty.memory.importance
    torch.testing.assert_close(ours.sum(), theirs.sum(), rtol=2e-3, atol=0)  # of another sample of the rows


def test_the_penalty_changes_the_result_and_a_stronger_one_changes_it_more():
    moved = []
    for method, settings in ((None, {}), ("ewc", {"strength": 1.0}), ("ewc", {"strength": 100.0})):
        module, first = two_tasks(method, **settings)
        moved.append(float((flat(module) - first).norm()))
    assert moved[2] < 0.8 * moved[1] < 0.8 * 0.99 * moved[0]


def test_naive_adds_nothing():
    assert torch.equal(flat(two_tasks("naive")[0]), flat(two_tasks(None)[0]))


def test_adding_the_gradient_is_adding_the_term():
    results = []
    for gradient in (False, True):
        module = network(torch.float64)
        penalty = Penalty(module, "ewc", strength=30.0)
        for task in TASKS:
            train(module, penalty, *rows(task, dtype=torch.float64), gradient=gradient)
        results.append(flat(module))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["ewc", "evcl"])
def test_forgetting_is_less(method):
    def accuracy(module):
        return float((module(TASKS[0].test.x).argmax(1) == TASKS[0].test.y).double().mean())

    results = []
    for one in (None, method):
        module = network()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            penalty = None if one is None else Penalty(module, one)
            for task in TASKS:
                train(module, penalty, *task.train, epochs=10)
        results.append(accuracy(module))
    assert results[1] > results[0] + 0.15


def test_gaussian_weights_are_drawn_in_training_only():
    module, plain = network(), network()
    penalty = Penalty(module, "evcl")
    x = rows(TASKS[0])[0]
    with torch.random.fork_rng():
        module.train()
        assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), plain(x))
    found = penalty.plain()
    assert [type(part) for part in found.modules()] == [type(part) for part in plain.modules()]
    assert all(torch.equal(a, b) for a, b in zip(found.state_dict().values(), plain.state_dict().values(), strict=True))
    assert list(found.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        found[0].weight.zero_()
    assert torch.equal(module(x), plain(x))  # a copy, and the original is as it was


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_works_or_is_refused(method):
    """None adds nothing without a word."""
    if METHODS[method].learn.__module__.split(".")[0] != "evcl":
        pytest.skip("a plugin's")
    if method not in (*ACCEPTED, "naive"):
        with pytest.raises(evcl.EvclError, match="which a penalty cannot"):
            two_tasks(method)
        return
    module, _ = two_tasks(method)
    assert bool(flat(module).isfinite().all())
    assert torch.equal(flat(module), flat(two_tasks("naive")[0])) == (method == "naive")


@pytest.mark.parametrize("method", ["ewc", "kfac-ewc", "evcl"])
def test_what_it_remembers_is_saved_and_is_no_alias(method):
    module = network()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        penalty = Penalty(module, method)
        train(module, penalty, *rows(TASKS[0]))
        state = penalty.state_dict()
        other = network()
        again = Penalty(other, method)
        other.load_state_dict(module.state_dict())
        before = {name: tensor.clone() for name, tensor in state["memory"].items()}
        torch.manual_seed(1)
        train(module, penalty, *rows(TASKS[1]))
        assert all(torch.equal(before[name], tensor) for name, tensor in state["memory"].items())
        again.load_state_dict(state)
        torch.manual_seed(1)
        train(other, again, *rows(TASKS[1]))
    assert torch.equal(flat(other), flat(module))
    assert again.tasks == 2


def test_the_anchor_stays_when_the_module_moves():
    module = network()
    penalty = Penalty(module, "ewc")
    train(module, penalty, *rows(TASKS[0]))
    penalty.begin(rows(TASKS[1]))
    assert penalty().item() == 0
    with torch.no_grad():
        module[0].weight.add_(0.1)
    assert penalty().item() > 0
    penalty.cancel()
    assert penalty().item() == 0


def test_a_module_may_grow():
    module = network(outputs=5)
    penalty = Penalty(module, "ewc")
    x, y = rows(TASKS[0])
    train(module, penalty, x[y < 5], y[y < 5])
    old = module[2]
    module[2] = nn.Linear(12, 10)
    with torch.no_grad():
        module[2].weight[:5], module[2].bias[:5] = old.weight, old.bias
    penalty.begin((x, y))
    assert penalty().item() == 0
    with torch.no_grad():
        module[2].weight[5:] += 1
    assert penalty().item() == 0  # new outputs are free
    with torch.no_grad():
        module[2].weight[:5] += 1
    assert penalty().item() > 0
    penalty.end()
    assert penalty.memory.importance.shape[1] == flat(module).numel()


class Counted(Dataset):
    def __init__(self, count):
        self.count, self.read = count, 0

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        self.read += 1
        return TASKS[0].train.x[i % 500], int(TASKS[0].train.y[i % 500]), 7  # the task's number is not used


def test_only_a_sample_of_a_data_set_is_read_but_all_of_it_counts():
    data = Counted(5000)
    penalty = Penalty(network(), "ewc", fisher_examples=100)
    with penalty.task(data):
        pass
    assert data.read == 1000
    assert float(penalty.memory.rows[0]) == 5000


def test_a_network_with_several_inputs_and_outputs():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(2, 4)

        def forward(self, left, right):
            return {"logits": self.a(left) + self.b(right), "other": left}

    module = Pair()
    penalty = Penalty(module, "ewc", output="logits")
    data = {"left": torch.randn(20, 3), "right": torch.randn(20, 2), "labels": torch.arange(20) % 4}
    with penalty.task(data):
        pass
    assert bool((penalty.memory.importance > 0).all())


def twice():
    penalty = Penalty(network(), "ewc")
    penalty.begin(rows(TASKS[0]))
    penalty.begin(rows(TASKS[0]))


def other_module():
    Penalty(network(), "ewc").load_state_dict(Penalty(network(outputs=4), "ewc").state_dict())


def grown_gaussian():
    module = network()
    penalty = Penalty(module, "evcl")
    module[2] = nn.Linear(12, 11)
    penalty.begin(rows(TASKS[0]))


def diverged():
    module = network()
    penalty = Penalty(module, "ewc")
    penalty.begin(rows(TASKS[0]))
    with torch.no_grad():
        module[0].weight.fill_(math.nan)
    penalty.end()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: Penalty(network(), "ewc", lr=0.1), "lr is decided by the loop"),
        (lambda: Penalty(network(), "ewc", strenth=1), "unknown setting of ewc 'strenth'"),
        (lambda: Penalty(network(), "evcl", distill=0.1), "distill is a loss on the outputs"),
        (lambda: Penalty(network(), "evcl", prior="one"), "prior must be 'zero' or 'network'"),
        (lambda: Penalty(network(), "er"), "er trains on kept examples, which a penalty cannot"),
        (lambda: Penalty(nn.Sequential(nn.LSTM(3, 4)), "evcl"), "'0' (LSTM) cannot have Gaussian weights"),
        (lambda: Penalty(network(), "ewc").end(), "no task has begun"),
        (twice, "a task has begun already"),
        (
            lambda: Penalty(network(), "ewc").begin((torch.ones(2, 64), [3, 10])),
            "10 outputs, from 0, but they are 3 to 10",
        ),
        (lambda: Penalty(network(), "ewc").begin((torch.ones(2, 64), ["a", "b"])), "but these are text"),
        (lambda: Penalty(network(), "ewc").begin((torch.ones(2, 64), [0, 1]), n=1), "cannot be 1: there are 2"),
        (lambda: Penalty(network(), "ewc").begin((torch.ones(2, 3), [0, 1])), "does not take inputs of shape (2, 3)"),
        (lambda: Penalty(3, "ewc"), "module must be a torch.nn.Module, not int"),
        (lambda: Penalty(network(), "ewc").load_state_dict({}), "the state is damaged"),
        (other_module, "the state is that of another module"),
        (grown_gaussian, "evcl cannot follow"),
        (diverged, "not finite: the loop diverged"),
    ],
)
def test_a_mistake_is_one_clear_line(act, message):
    with pytest.raises(evcl.EvclError) as error:
        act()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_task_that_fails_is_forgotten():
    penalty = Penalty(network(), "ewc")
    with pytest.raises(ZeroDivisionError), penalty.task(rows(TASKS[0])):
        raise ZeroDivisionError
    assert penalty.tasks == 0
    with penalty.task(rows(TASKS[0])):
        pass
    assert penalty.tasks == 1
    assert repr(penalty) == "Penalty('ewc', 1 task learned)"


def test_frozen_weights_are_left_alone():
    module = network()
    module[0].requires_grad_(False)
    penalty = Penalty(copy.deepcopy(module), "evcl")
    assert [name for name, _ in penalty.module.named_parameters()][:2] == ["0.weight", "0.bias"]
    with penalty.task(TensorDataset(*rows(TASKS[0]))):
        assert penalty().item() > 0
    assert penalty.memory.importance.shape[1] == 130


@pytest.mark.parametrize(
    ("name", "package", "called"),
    [
        ("avalanche", "avalanche", "avalanche-lib"),
        ("continuum", "continuum", "continuum"),
        ("transformers", "transformers", "transformers"),
        ("lightning", "lightning", "lightning"),
        ("laplace", "laplace", "laplace-torch"),
    ],
)
def test_a_missing_package_is_one_clear_line(name, package, called, monkeypatch):
    for loaded in [one for one in sys.modules if one.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"evcl.integrations.{name}", raising=False)
    with pytest.raises(evcl.EvclError) as error:
        importlib.import_module(f"evcl.integrations.{name}")
    assert str(error.value) == f"evcl.integrations.{name} needs {called}: pip install 'evcl[{name}]'"
