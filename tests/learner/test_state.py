"""What a learner is between tasks is one value: predictions use it while a round learns, from any thread."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import evcl
from evcl import methods

THREADS, CALLS = 4, 20


def rows(seed, n=90):
    x = np.random.default_rng(seed).normal(size=(n, 6)).astype("float32")
    return x, (x[:, 0] + x[:, seed % 5 + 1] > 0).astype(int)


class Conv(nn.Module):
    """A network of the user's own, with a part that never changes, statistics and a parameter outside layers."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.shift = nn.Parameter(torch.full((8,), 0.1))
        self.rest = nn.Linear(8, 8)

    def forward(self, x):
        self.last = torch.relu(self.norm(self.frozen(x))) + self.shift
        return torch.relu(self.rest(self.last))


class Keeping(nn.Module):
    """A recurrent network that keeps what it computed, in a list."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 8, batch_first=True)

    def forward(self, x):
        y = self.lstm(x.view(-1, 3, 2))[0][:, -1]
        if torch.is_grad_enabled():
            self.computed = [y]
        return y


KINDS = {
    "mlp": lambda: evcl.EVCL(evcl.nn.mlp(6, [8]), epochs=3),
    "conv": lambda: evcl.EVCL(Conv(), skip="frozen", epochs=3),
    "film": lambda: evcl.VCL(evcl.nn.mlp(6, [8]), film=True, epochs=3),
    "adapters": lambda: evcl.VCL(Conv(), adapters=evcl.nn.LoRA(rank=2, tasks="merged"), epochs=3),
    "columns": lambda: evcl.Learner(evcl.nn.mlp(6, [8]), "progressive", epochs=3),
    "generator": lambda: evcl.Learner(evcl.nn.mlp(6, [8]), "dgr", epochs=3),
    "recurrent": lambda: evcl.EVCL(Keeping(), epochs=3),
    "numbers": lambda: evcl.EVCL(evcl.nn.mlp(6, [8]), likelihood="gaussian", epochs=3),
}


def made(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return KINDS[kind]()


def learned(kind, tasks=2):
    learner = made(kind)
    for k in range(tasks):
        learner.learn(rows(k), f"task {k}")
    return learner


X = rows(9)[0]


def said(learner):
    return [np.asarray(learner.predict(X, task)) for task in learner.tasks] + [
        np.asarray(one) for task in learner.tasks for one in learner.predictions(X, task)[1:5]
    ]


def same(one, other):
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_every_thread_predicts_the_same(kind):
    learner = learned(kind)
    expected = said(learner)
    with ThreadPoolExecutor(THREADS) as threads:
        found = list(threads.map(lambda _: said(learner), range(THREADS * CALLS)))
    assert [same(one, expected) for one in found] == [True] * THREADS * CALLS


class Asking(evcl.Callback):
    """Asks for predictions in this thread, and waits for those of another."""

    def __init__(self, ask):
        self.ask, self.found, self.threads = ask, [], ThreadPoolExecutor(1)

    def end_epoch(self, epoch):
        self.found += [self.ask(), self.threads.submit(self.ask).result()]


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_during_a_round_are_those_before_it(kind, tmp_path):
    learner = learned(kind)
    before, asking = said(learner), Asking(lambda: said(learner))
    learner.learn(rows(2), "task 2", callbacks=[asking])
    assert len(asking.found) >= 6
    assert all(same(one, before) for one in asking.found)
    undisturbed = learned(kind, 3)
    assert same(said(learner), said(undisturbed))


def test_predictions_go_on_in_another_thread_while_a_round_learns():
    learner, going, found = learned("conv"), threading.Event(), []
    before = said(learner)

    def ask():
        while not going.is_set():
            found.append(same(said(learner), before))

    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask)
        other = Asking(lambda: None)
        learner.learn(rows(2), "task 2", epochs=60, callbacks=[other])
        going.set()
        asked.result()
    assert len(found) > 1
    assert all(found[:-1])  # the last may be of the new state
    assert same(said(learner)[:2], said(learner)[:2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_that_fails_leaves_the_old_state(kind):
    learner, other = learned(kind), learned(kind)
    before = said(learner)

    class Failing(evcl.Callback):
        def __init__(self, at):
            self.at = at

        def end_epoch(self, epoch):
            if self.at == "epoch" and epoch.epoch == 2:
                raise ZeroDivisionError

        def end_task(self, task, epochs):
            if self.at == "task":
                raise KeyboardInterrupt

    for at, error in (("epoch", ZeroDivisionError), ("task", KeyboardInterrupt)):
        with pytest.raises(error):
            learner.learn(rows(2), "task 2", callbacks=[Failing(at)])
        assert same(said(learner), before)
        assert learner.tasks == other.tasks
        assert learner.card() == other.card()
    for one in (learner, other):
        one.learn(rows(3), "task 3")
    assert same(said(learner), said(other))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda learner: pickle.loads(pickle.dumps(learner))])  # noqa: S301
def test_a_copy_says_and_learns_the_same(kind, copied):
    learner = learned(kind)
    before, other = said(learner), copied(learner)
    assert type(other) is type(learner)
    assert other.history == learner.history
    assert same(said(other), before)
    other.learn(rows(2), "task 2")
    assert same(said(learner), before)
    learner.learn(rows(2), "task 2")
    assert same(said(learner), said(other))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda learner: pickle.loads(pickle.dumps(learner))])  # noqa: S301
def test_a_copy_of_a_learner_that_has_learned_nothing(copied):
    one, other = made("conv"), None
    other = copied(one)
    for learner in (one, other):
        learner.learn(rows(0), "task 0")
    assert same(said(one), said(other))


class Tagged(evcl.VCL):
    """A class of the user's own."""


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda learner: pickle.loads(pickle.dumps(learner))])  # noqa: S301
def test_a_copy_has_the_attributes_of_the_users_class(copied):
    learner = Tagged(evcl.nn.mlp(6, [8]), epochs=2)
    learner.tags = ["january"]
    learner.learn(rows(0), "task 0")
    other = copied(learner)
    other.learn(rows(1), "task 1")
    assert (type(other), other.tags, learner.tasks) == (Tagged, ["january"], ("task 0",))
    assert (other.tags is learner.tags) == (copied is copy.copy)


@pytest.mark.parametrize("likelihood", ["gaussian", "poisson"])
def test_a_method_of_the_users_own_learns_numbers(likelihood):
    learner = evcl.Learner(
        evcl.nn.mlp(6, [8]), replace(methods.get("vcl"), name="own"), likelihood=likelihood, epochs=2
    )
    x, y = rows(0)
    learner.learn((x, y.astype(float)), task="task 0")
    assert learner.tasks == ("task 0",)


def test_settings_changed_in_a_round_that_fails_are_those_before_it():
    learner = made("mlp")

    class Failing(evcl.Callback):
        def end_task(self, task, epochs):
            learner.keep(7)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        learner.learn(rows(0), callbacks=[Failing()])
    assert learner.settings.get("memory", 0) == 0
    learner.keep(7)
    learner.learn(rows(0))
    assert learner.kept == 7
