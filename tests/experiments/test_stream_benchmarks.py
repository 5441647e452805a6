"""Streams of rows as benchmarks: run, resumed and refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from evcl import EvclError, experiments
from evcl._core.errors import Diverged
from evcl._core.randomness import generator
from evcl.benchmarks import BENCHMARKS, get, register
from evcl.benchmarks.elsewhere import rows
from evcl.experiments.streams import METHODS
from evcl.streams.online import Online
from evcl.streams.sources import REPORTED, SOURCES, Drift, generated
from evcl.streams.sources import register as add_source
from evcl.training import Checkpoints, Stopped

ROWS = 400


@pytest.fixture(scope="module", autouse=True)
def tiny_sea():
    source = add_source(generated("sea", Drift((0, 2), (200,)), ROWS, "tiny-sea", "made up"))
    register(rows(source.name, source.summary, source.seeded))
    yield source
    BENCHMARKS.remove("tiny-sea")
    SOURCES.remove("tiny-sea")


def configured(method=None, seeds=(0, 1), **given):
    return experiments.configure("tiny-sea", method, seeds=seeds, given=given)


def test_ekf_is_used_if_no_method_is_named():
    assert configured().method == "ekf"
    assert experiments.configure("split-digits").method == "evcl"


@pytest.mark.parametrize("method", METHODS)
def test_a_run_predicts_every_row_before_it_is_learned(method):
    events = []
    result = experiments.execute(configured(method), events.append)
    assert result.accuracy is None
    assert result.prequential.rows == ROWS
    assert result.prequential.changes == [200]
    assert result.average_accuracy.per_seed == result.prequential.measures["accuracy"].per_seed
    assert result.average_accuracy.mean > 0.65
    assert result.nll.mean < 0.75
    assert result.average_accuracy.std is not None
    assert len(result.prequential.curves["nll"]) == 2
    assert len(result.prequential.alarms) == 2
    assert result.memory_bytes > 0
    assert events[-1].done == 1


def test_the_result_file_is_read_back(tmp_path):
    result = experiments.execute(configured("naive"))
    path = experiments.write_result(tmp_path, result)
    assert experiments.read_result(path) == result
    assert json.loads(path.read_text())["accuracy"] is None


@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_run_goes_on_bit_for_bit(method, tmp_path):
    config = configured(method, seeds=(3,), batch_size=8)
    whole = experiments.execute(config)
    left = iter(range(20))
    stopping = Checkpoints(tmp_path, stop=lambda: next(left, None) is None)
    with pytest.raises(Stopped):
        experiments.execute(config, checkpoints=stopping)
    assert stopping.programs()
    for _ in range(2):  # it stops once more after its first batch, and is resumed again
        once = iter([False])
        with pytest.raises(Stopped):
            experiments.execute(
                config, checkpoints=Checkpoints(tmp_path, resume=True, stop=lambda once=once: next(once, True))
            )
    found = experiments.execute(config, checkpoints=Checkpoints(tmp_path, resume=True))
    assert found.prequential == whole.prequential
    assert found.average_accuracy == whole.average_accuracy


def test_another_run_is_not_resumed(tmp_path):
    with pytest.raises(Stopped):
        experiments.execute(configured(seeds=(3,)), checkpoints=Checkpoints(tmp_path, stop=lambda: True))
    with pytest.raises(EvclError, match="batch_size is 16 there and 4 here"):
        experiments.execute(configured(seeds=(3,), batch_size=4), checkpoints=Checkpoints(tmp_path, resume=True))
    with pytest.raises(EvclError, match="checkpoint of an unfinished run"):
        experiments.execute(configured(seeds=(3,)), checkpoints=Checkpoints(tmp_path))


def test_what_a_stream_of_rows_does_not_have():
    with pytest.raises(EvclError, match="unknown method for a stream of rows 'ewc'"):
        configured("ewc")
    for given, message in (
        ({"validation": 0.1}, "every row of tiny-sea is predicted before it is learned"),
        ({"network": "20x20"}, "a stream makes its own network"),
        ({"scenario": "class"}, "leave out network and scenario"),
    ):
        with pytest.raises(EvclError, match=message):
            experiments.execute(configured(**given))
    with pytest.raises(EvclError, match="learned on the CPU"):
        experiments.execute(replace(configured(), device="cuda"))
    with pytest.raises(EvclError, match=r"evcl.streams.get\('tiny-sea'\) reads it"):
        get("tiny-sea")
    with pytest.raises(EvclError, match="epochs"):
        configured(epochs=3)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_learner_that_diverges_is_an_error_or_has_no_score(monkeypatch):
    def step(self, x, y):
        self.rows += len(y)
        return torch.full((len(y), 2), math.nan), None

    monkeypatch.setattr(Online, "step", step)
    with pytest.raises(Diverged, match="tiny-sea naive, seed 0: its predictions are no longer finite"):
        experiments.execute(configured("naive"))
    result = experiments.execute(configured("naive"), allow_divergence=True)
    assert result.average_accuracy.mean is None
    assert result.prequential.measures["nll"].mean is None


def test_naive_is_a_step_of_adam_per_batch():
    """Beside the same network in plain torch."""
    source = generator(0, "test")
    x, y = torch.randn(60, 4, generator=source).double(), torch.randint(0, 3, (60,), generator=source)
    learner = Online(4, 3, seed=0, lr=0.01)
    hidden, out = (p.detach().clone().requires_grad_() for p in (learner.hidden, learner.out))
    adam = torch.optim.Adam([hidden, out], 0.01)
    seen = x[:20]
    for start in range(0, 60, 20):
        z = 3 * ((x[start : start + 20] - seen.mean(0)) / seen.std(0, correction=0) / 3).tanh()
        z = torch.cat([z, torch.ones(20, 1)], 1)
        scores = torch.cat([torch.tanh(z @ hidden.T), z], 1) @ out.T
        logits = torch.cat([torch.zeros(20, 1), scores], 1)
        p, _ = learner.step(x[start : start + 20], y[start : start + 20])
        torch.testing.assert_close(p, logits.softmax(1))
        adam.zero_grad()
        torch.nn.functional.cross_entropy(logits, y[start : start + 20]).backward()
        adam.step()
        seen = x[: start + 20]


def test_every_reported_stream_is_a_benchmark():
    found = {name: entry.seeded for name, entry in BENCHMARKS.items() if entry.kind == "rows" and name != "tiny-sea"}
    assert found == {source.name: source.seeded for source in REPORTED}
