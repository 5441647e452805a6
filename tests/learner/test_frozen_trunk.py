"""The part of a network that never changes is computed once per task and prediction, with the same results."""

from __future__ import annotations

import pytest
import torch
from checks import quietly, run_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evcl
from evcl.nn import bayesianize
from evcl.nn.network import ALL_LAYERS, BayesianNetwork
from evcl.training import TaskData

N, EPOCHS = 120, 20
Y = torch.arange(N) % 3
X = torch.randn(N, 2, 6, 6, generator=torch.Generator().manual_seed(0)) + Y.view(-1, 1, 1, 1)
rows: list[int] = []  # of each pass through `Counts`; a learner trains copies of a network, which share this list


class Counts(nn.Module):
    def forward(self, x):
        rows.append(len(x))
        return x


def backbone():
    norm = nn.BatchNorm2d(4)
    norm.running_mean.normal_()
    first = Counts(), nn.Conv2d(2, 4, 3), norm, nn.ReLU(inplace=True)
    return nn.Sequential(*first, nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 8)).double()


class Wrapped(nn.Module):
    """The same, not as an nn.Sequential."""

    def __init__(self):
        super().__init__()
        self.inside = backbone()

    def forward(self, x):
        return self.inside(x).tanh()


def upper():
    """A frozen backbone, and a layer above it that learns."""
    return quietly(lambda: nn.Sequential(backbone(), nn.Tanh(), nn.Linear(8, 6), nn.Tanh()).double())


def wrapped():
    return quietly(Wrapped)


KINDS = {"whole": (wrapped, []), "first layers": (upper, ["2"])}


@pytest.fixture(autouse=True)
def _no_rows():
    rows.clear()


@pytest.fixture
def without(monkeypatch):
    """Compute the trunk each time: the reference."""

    def stop():
        monkeypatch.setattr(BayesianNetwork, "below", lambda self, x: None)

    return stop


def made(kind, method="evcl", **options):
    make, only = KINDS[kind]
    options = {"epochs": EPOCHS, "batch_size": 30, "dtype": torch.float64, **options}
    return evcl.Learner(make(), method, only=only, **options)


def mean(learner):
    return learner.state.run.network.posterior.mean


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["naive", "ewc", "evcl"])
def test_twenty_epochs_cost_one_pass_of_the_frozen_part(kind, method, without):
    learner = made(kind, method)
    learner.learn((X, Y))
    assert N <= sum(rows) <= N + 60  # the few more look at shapes, and at whether examples affect each other
    rows.clear()
    learner.learn((X + 0.1, Y), head="0")  # a teacher, domains and the Fisher of the second task included
    assert N <= sum(rows) <= 2 * N + 60
    without()
    again = made(kind, method)
    rows.clear()
    again.learn((X, Y))
    assert sum(rows) > EPOCHS * N


@pytest.mark.parametrize("kind", KINDS)
def test_a_prediction_costs_one_pass_of_the_frozen_part(kind):
    learner = made(kind, epochs=1, predict_samples=8)
    learner.learn((X[Y < 2], Y[Y < 2]))
    learner.learn((X[Y == 2], Y[Y == 2]), head="0")  # told apart by its likelihood, which needs the features too
    rows.clear()
    learner.predict_proba(X)
    assert N <= sum(rows) <= N + 60


METHODS_HERE = ["naive", "ewc", "evcl", "er", "derpp", "agem", "lwf", "si", "mas", "kfac-evcl", "vogn", "evcl-er"]
METHODS_HERE += ["vcl-kcenter-coreset", "td-vcl", "fromp", "generative-classifier", "noisy-kfac"]


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS_HERE)
def test_the_results_are_those_of_a_trunk_computed_each_time(kind, method, without):
    def learned():
        learner = made(kind, method, epochs=2)
        learner.learn((X, Y), validation=(X[:20], Y[:20]))
        learner.learn((X.flip(3) * 0.5, Y), task="b")
        return learner

    found = learned()
    kept = found.state.run.kept_examples()
    assert all(task.x.shape[2:] == X.shape[1:] for task in kept)  # kept rows are inputs, as files have them
    without()
    wanted = learned()
    torch.testing.assert_close(mean(found), mean(wanted), rtol=1e-7, atol=1e-9)
    for task in ("0", "b"):
        ours, theirs = (one.predict_proba(X, task=task) for one in (found, wanted))
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["ewc", "evcl"])
def test_replicas_share_the_features(kind, method):
    def run(seeds):
        make, only = KINDS[kind]
        made = run_of(method, make(), {"epochs": 3, "batch_size": 30}, seeds, only=only, dtype=torch.float64)
        made.add_head(made.features(X[:1].double()), 3)
        rows.clear()
        made.learn([TaskData(X.double().unsqueeze(0), Y.unsqueeze(0), 0)])
        return made

    several = run([3, 4, 5])
    assert sum(rows) <= N + 60
    torch.testing.assert_close(several.network.posterior.mean[1:2], run([4]).network.posterior.mean)


def test_what_is_not_fixed_is_not_kept():
    for p in (trunk := wrapped()).parameters():
        p.requires_grad_(False)
    network = bayesianize(trunk)  # frozen weights, but dropout: only=[] would leave it out
    assert network.fixed == 0
    assert bayesianize(wrapped(), only=[]).fixed == ALL_LAYERS
    assert bayesianize(upper(), only=["2"]).fixed == 2
    assert bayesianize(upper(), only=["2"], film=True).fixed == 0
    assert bayesianize(nn.Sequential(nn.Flatten(), nn.Tanh())).fixed == 0  # no weights, so nothing to gain
    assert bayesianize(upper()).fixed == 0


class Mixes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = quietly(lambda: nn.Linear(6, 4))

    def forward(self, x):
        h = self.linear(x)
        return h - h.mean(0)


def test_examples_that_affect_each_other_are_computed_anew():
    x = X[:20].flatten(1)[:, :6].unsqueeze(0)
    network = bayesianize(Mixes(), only=[])
    assert network.fixed == ALL_LAYERS
    assert network.below(x) is None
    evcl.Learner(Mixes(), "naive", only=[], epochs=2).learn((x[0], torch.arange(20) % 2))


def test_what_is_too_large_to_keep_is_computed_anew(monkeypatch):
    network = bayesianize(wrapped(), only=[])
    assert network.below(X.unsqueeze(0)) is not None
    monkeypatch.setattr("evcl.nn.network.KEPT_NUMBERS", 10)
    assert network.below(X.unsqueeze(0)) is not None  # its output is smaller than its inputs
    wide = bayesianize(nn.Sequential(quietly(lambda: nn.Linear(2, 9))), only=[])
    assert wide.below(torch.zeros(1, 30, 2)) is None


def test_inputs_that_were_changed_in_place_are_computed_anew():
    x, network = X.clone().unsqueeze(0), bayesianize(wrapped(), only=[])
    with network.keeping():
        first = network.below(x)
        assert network.below(x) is first
        x.add_(1)
        assert not torch.equal(network.below(x), first)
    assert network.below(x) is not network.below(x)  # nothing is kept outside


def test_a_loader_read_anew_and_augmented_images_pass_through_the_trunk_each_time():
    learner = made("whole", "naive", epochs=3)
    learner.learn(DataLoader(TensorDataset(X, Y), 50), reread=True)
    assert sum(rows) >= 3 * N
    rows.clear()
    made("whole", "er", epochs=3, augment=True).learn((X, Y))
    assert sum(rows) >= 3 * N


class Two(nn.Module):
    """Two inputs by name, one of them numbers of words."""

    def __init__(self):
        super().__init__()
        self.words, self.about = quietly(lambda: nn.Embedding(9, 4)), quietly(lambda: nn.Linear(3, 4))

    def forward(self, ids, about, mask=None):
        rows.append(len(ids))
        return (self.words(ids) * mask.unsqueeze(2)).sum(1) + self.about(about)


@pytest.mark.parametrize("method", ["ewc", "er"])
def test_several_inputs(method, without):
    ids = [[1 + k % 3, 2, 3][: 1 + k % 3] for k in range(N)]
    data = {"ids": ids, "about": X.flatten(1)[:, :3]}

    def learned():
        learner = evcl.Learner(Two(), method, only=[], epochs=6, batch_size=30, dtype=torch.float64)
        learner.learn((data, Y))
        learner.learn(({"ids": [[4, *row] for row in ids], "about": data["about"]}, Y), task="longer")
        return learner

    found = learned()
    assert sum(rows) <= (3 if method == "er" else 2) * N + 200  # its kept rows pass once more, in the second task
    without()
    wanted = learned()
    torch.testing.assert_close(mean(found), mean(wanted), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(found.predict_proba(data, task="0"), wanted.predict_proba(data, task="0"))


def test_kept_rows_and_a_saved_file_continue_alike(tmp_path):
    learner = made("first layers", "er", epochs=2)
    learner.learn((X, Y))
    learner.save(tmp_path / "model")
    again = evcl.load(tmp_path / "model", network=upper())
    for one in (learner, again):
        one.learn((X + 1, Y), task="b")
    assert torch.equal(mean(again), mean(learner))
