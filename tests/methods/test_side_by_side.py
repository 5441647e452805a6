"""Several methods in one run: each replica learns as it does alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, count

import pytest
import torch
from torch import nn

import evcl
from evcl._core.errors import EvclError
from evcl._core.settings import resolve
from evcl._core.summaries import METHOD_SUMMARIES
from evcl.benchmarks import Benchmark, Examples, Task
from evcl.methods import METHODS, Fit, Learned, Method, Tracker, packing, per_weight
from evcl.methods.together import grouped, kind
from evcl.training import Checkpointer, Run, TaskData, learn_stream
from evcl.training.checkpoint import Checkpoints, newest
from evcl.training.checkpointer import Stopped

F64 = torch.float64
linear = nn.utils.skip_init
NETWORKS = {
    "chain": lambda: evcl.nn.mlp(5, [8]),
    "batch norm": lambda: nn.Sequential(linear(nn.Linear, 5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1)),
}
PROGRAMS = [
    ["evcl", "vcl"],
    ["naive", "ewc", "lwf"],
    ["lwf", "si", "mas", "ewc-offline"],
    ["vcl-random-coreset", "vcl-kcenter-coreset"],
    ["random-coreset", "kcenter-coreset"],
    ["vcl", "evcl", "vcl", "evcl"],
    ["evcl", "kfac-evcl", "gvcl"],
    ["evcl-film", "gvcl-film"],
    ["ewc", "kfac-ewc", "imm-mean", "imm-mode"],
    *(  # of a kind of their own
        [name] * 2
        for name in (
            "improved-vcl",
            "td-vcl",
            "vogn",
            "ivon",
            "noisy-kfac",
            "ekf",
            "xdg",
            "evcl-er",
            "er",
            "derpp",
            "agem",
            "fromp",
            "scommer",
            "dgr",
            "evcl-dgr",
            "progressive",
            "progress-compress",
            "generative-classifier",
        )
    ),
]


def tasks(shared):
    """Two tasks, whose examples all replicas share, or of which each has its own."""
    found = []
    for head in range(2):
        x = torch.randn(1 if shared else 4, 30, 5, generator=torch.Generator().manual_seed(head), dtype=F64)
        found.append(TaskData(x, (x[..., head] > 0).long(), head, task=head))
    return found


def trained(names, replicas, network, shared, **given):
    """Two rounds of these methods, as replicas of these numbers."""
    settings = []
    for name, r in zip(names, replicas, strict=True):
        known = METHODS[name].known_settings
        usual = {"epochs": 2, "batch_size": 8, "lr": 0.002 * (1 + r), "coreset_size": 6, "strength": 1.0 + r}
        settings.append(resolve(name, known, {k: v for k, v in {**usual, **given}.items() if k in known}))
    methods = [METHODS[name] for name in names]
    run = Run(NETWORKS[network](), methods, settings, [4 + r for r in replicas], draw=True, dtype=F64)
    for task in tasks(shared):
        run.add_head(8, 2)
        run.learn([task.replicas(replicas)])
    return run, [run.predict(task.replicas(replicas).x, task.head, task=task.task) for task in tasks(shared)]


@pytest.mark.full
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("names", PROGRAMS, ids=" ".join)
def test_each_is_its_run_alone(names, network, shared):
    """Its posterior, what layers measured, what is remembered of it, and what it predicts."""
    # while a batch norm measures, FiLM's shifts before it have no gradient: Adam moves them by rounding errors
    most = 1e-6 if (names[0], network) == ("evcl-film", "batch norm") else 1e-9
    close = {"rtol": most, "atol": most}
    run, predicted = trained(names, range(len(names)), network, shared)
    statistics = run.network.statistics()
    assert bool(statistics) == (network == "batch norm")
    for r, name in enumerate(names):
        alone, predicted_alone = trained([name], [r], network, shared)
        for found, wanted in zip(predicted, predicted_alone, strict=True):
            torch.testing.assert_close(found[r], wanted[0], **close)
        for part in ("mean", "log_std"):
            found, wanted = (getattr(one.network.posterior, part) for one in (run, alone))
            if wanted is not None:
                torch.testing.assert_close(found[r], wanted[0], **close)
        for key, wanted in alone.network.statistics().items():
            torch.testing.assert_close(statistics[key][r], wanted[0], **close)
        (k,) = (k for k, group in enumerate(run.groups) if r in group.replicas)
        row = run.groups[k].replicas.index(r)
        remembered, wanted = packing.tensors(run.memories[k]), packing.tensors(alone.memory)
        assert remembered.keys() == wanted.keys()
        for key, tensor in wanted.items():
            torch.testing.assert_close(remembered[key][row], tensor[0], **close)


def test_what_several_methods_remember_is_saved_and_loaded():
    names = ["vcl", "evcl", "vcl"]
    run, _ = trained(names, range(3), "batch norm", shared=True)
    tensors = {name: t.clone() for name, t in run.tensors().items()}
    other, _ = trained(names, range(3), "batch norm", shared=True)
    other.learn([tasks(True)[0]])
    other.load_tensors(tensors, run.outline(), run.rounds, run.seen)
    for one in (run, other):
        one.learn([tasks(True)[1]])
    ours, theirs = run.tensors(), other.tensors()
    assert ours.keys() == theirs.keys()
    assert {"memory 0/prior/mean", "memory 1/importance"} <= ours.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_every_method_is_beside_another_or_refused():
    """A program above has it, and every pair of different kinds is refused by name."""
    built_in = [name for name in METHOD_SUMMARIES if not METHODS[name].jointly]
    assert {name for names in PROGRAMS for name in names} == set(built_in)
    refused = 0
    for a, b in combinations(METHOD_SUMMARIES, 2):
        pair = [METHODS[a], METHODS[b]]
        each = [resolve(one.name, one.known_settings, {}) for one in pair]
        if kind(pair[0]) == kind(pair[1]):
            assert len(grouped(pair, each)) == 2
        else:
            with pytest.raises(EvclError, match=f"{a} and {b} cannot share a program"):
                grouped(pair, each)
            refused += 1
    assert refused > 200


@pytest.mark.parametrize(
    "names", [["evcl", "ewc"], ["vcl", "vcl-random-coreset"], ["naive", "joint"], ["naive", "random-coreset"]]
)
def test_methods_of_different_kinds_are_refused(names):
    with pytest.raises(EvclError, match="cannot share a program: they differ in `bayesian`"):
        trained(names, range(2), "chain", shared=True)


# --- trackers and checkpoints ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Squares:
    total: torch.Tensor = per_weight(low=0)


class Heard(Tracker):
    """The sum of squared gradients, times a factor."""

    def __init__(self, factor):
        self.factor = factor

    def begin(self, q, part):
        self.total = torch.zeros_like(q.mean)

    def before(self, q, grads):
        self.total.add_(self.factor * grads.mean.square())

    def buffers(self):
        return [self.total]

    def result(self):
        return self.total


def twice(name, factor):
    """A method of two fits a task, which remembers what a tracker heard in both."""

    def learn(memory, round_, s):
        first = yield Fit(round_.tasks, trackers=[Heard(factor)])
        second = yield Fit(round_.tasks, start=first.q, trackers=[Heard(factor)], stage="second")
        return Learned(second.q, Squares(memory.total + first.tracked[0] + 2 * second.tracked[0]))

    return Method(name, "", bayesian=False, learn=learn, memory=Squares, stages=2, shares="twice")


def test_two_methods_with_trackers_that_stop_in_the_second_fit_resume_to_the_bit(tmp_path):
    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
    parts = [Examples(x, (x[:, k] > 0).long()) for k in range(2)]
    stream = Benchmark("small", [Task(str(k), str(k), (0, 1), one, one) for k, one in enumerate(parts)], hidden=[4])

    def learned(stop, folder):
        methods = [twice("once", 1.0), twice("thrice", 3.0)]
        settings = [resolve("x", one.known_settings, {"epochs": 2, "batch_size": 8}) for one in methods]
        run = Run(evcl.nn.mlp(5, [4]), methods, settings, [0, 1], draw=True)
        learn_stream(run, [stream], checkpointer=Checkpointer(Checkpoints(folder, 1e6, True, stop), {}, {}))
        return run.tensors()

    whole, stopped = learned(None, tmp_path / "whole"), set()
    for _ in range(40):
        polls = count(1)
        try:
            found = learned(lambda polls=polls: next(polls) >= 4, tmp_path / "parts")
            break
        except Stopped:
            where = newest(tmp_path / "parts").description
            stopped.add((where["round"], where.get("stage")))
    assert {(0, 1), (1, 1)} <= stopped
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert float(whole["memory 1/total"].sum()) > 0


def test_a_tracker_hears_nothing_of_a_replica_that_stopped():
    """Beside one that goes on it has heard what it hears alone."""

    def heard(stops):
        method = twice("once", 1.0)
        each = [resolve("x", method.known_settings, {"epochs": 20, "lr": 0.01, "stop_nll": stop}) for stop in stops]
        run = Run(evcl.nn.mlp(5, [8]), method, each, range(len(stops)), draw=True, dtype=F64)
        run.add_head(8, 2)
        run.learn([tasks(True)[0]])
        return run.memory.total

    alone, beside, on = heard([0.5]), heard([0.5, 0.0]), heard([0.0])
    torch.testing.assert_close(beside[0], alone[0], rtol=1e-9, atol=1e-12)
    assert float(on.sum()) > 1.01 * float(alone.sum())  # that it stopped can be seen
