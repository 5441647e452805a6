"""Trackers in a method of two fits, whose replicas stop at different epochs, or which is interrupted."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import torch
from checks import run_of, same

import evcl
from evcl.benchmarks import Benchmark, Examples, Task
from evcl.methods import Fit, Learned, Method, Tracker, per_weight
from evcl.training import Checkpointer, TaskData, learn_stream
from evcl.training.checkpoint import Checkpoints, newest
from evcl.training.checkpointer import Stopped

F64 = torch.float64


@dataclass(frozen=True)
class Squares:
    total: torch.Tensor = per_weight(low=0)


class Heard(Tracker):
    """The sum of squared gradients."""

    def begin(self, q, part):
        self.total = torch.zeros_like(q.mean)

    def before(self, q, grads):
        self.total.add_(grads.mean.square())

    def buffers(self):
        return [self.total]

    def result(self):
        return self.total


def twice():
    """A method of two fits a task, which remembers what a tracker heard in both."""

    def learn(memory, round_, s):
        first = yield Fit(round_.tasks, trackers=[Heard()])
        second = yield Fit(round_.tasks, start=first.q, trackers=[Heard()], stage="second")
        return Learned(second.q, Squares(memory.total + first.tracked[0] + 2 * second.tracked[0]))

    return Method("twice", "", bayesian=False, learn=learn, memory=Squares, stages=2)


def test_replicas_with_trackers_that_stop_in_the_second_fit_resume_to_the_bit(tmp_path):
    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
    parts = [Examples(x, (x[:, k] > 0).long()) for k in range(2)]
    stream = Benchmark("small", [Task(str(k), str(k), (0, 1), one, one) for k, one in enumerate(parts)], hidden=[4])

    def learned(stop, folder):
        each = [{"epochs": 2, "batch_size": 8, "lr": lr} for lr in (0.01, 0.1)]
        run = run_of(twice(), evcl.nn.mlp(5, [4]), each, [0, 1])
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
    assert same(found, whole)
    assert float(whole["memory/total"].sum()) > 0


def test_a_tracker_hears_nothing_of_a_replica_that_stopped():
    """Beside one that goes on it has heard what it hears alone."""

    def heard(stops):
        each = [{"epochs": 20, "lr": 0.01, "stop_nll": stop} for stop in stops]
        run = run_of(twice(), evcl.nn.mlp(5, [8]), each, range(len(stops)), (8, [2]), dtype=F64)
        x = torch.randn(1, 30, 5, generator=torch.Generator().manual_seed(0), dtype=F64)
        run.learn([TaskData(x, (x[..., 0] > 0).long(), 0)])
        return run.memory.total

    alone, beside, on = heard([0.5]), heard([0.5, 0.0]), heard([0.0])
    torch.testing.assert_close(beside[0], alone[0], rtol=1e-9, atol=1e-12)
    assert float(on.sum()) > 1.01 * float(alone.sum())  # that it stopped can be seen
