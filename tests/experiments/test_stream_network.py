"""A stream that brings its own network; that torch's generator is left alone, conftest.py checks."""

from __future__ import annotations

import pytest
from torch import nn

from evcl import EvclError
from evcl.benchmarks import BENCHMARKS, Benchmark, Entry, get, register
from evcl.experiments import configure, execute
from evcl.experiments.paper import cost
from evcl.report.runs import settings


def convolutional():
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())


@pytest.fixture
def benchmark():
    def build(request):
        return Benchmark("pictures", get("split-digits"), network=convolutional, seed=request.seed)

    register(Entry("pictures", "digits, a convolution", build, seeded=False))
    yield "pictures"
    BENCHMARKS.remove("pictures")


def test_it_is_what_learns(benchmark, monkeypatch):
    seen = []
    forward = nn.Unflatten.forward
    monkeypatch.setattr(nn.Unflatten, "forward", lambda self, x: seen.append(x.shape) or forward(self, x))
    given = {"epochs": 5, "lr": 0.01, "batch_size": 32}
    results = [execute(configure(benchmark, "vcl", "paper", [0], 1, given)) for _ in range(2)]
    assert seen
    assert results[0].accuracy == results[1].accuracy
    assert results[0].average_accuracy.mean > 0.9
    assert results[0].config["network"] == "convolutional"
    assert "hidden" not in results[0].config
    assert settings(results[0])["network"] == "convolutional"


def test_it_stays_with_a_part_of_the_stream(benchmark):
    assert get(benchmark, tasks=2, validation=0.2).network is convolutional


def test_a_stream_has_hidden_layers_or_a_network():
    for given in ({}, {"hidden": (8,), "network": convolutional}):
        with pytest.raises(EvclError, match=r"needs either hidden= .* or network="):
            Benchmark("pictures", get("split-digits"), **given)


def test_the_forecast_counts_its_weights(benchmark):
    config = configure(benchmark, "naive", "paper", [0], 1, {"epochs": 1})
    assert cost(config) == (4 * 9 + 4) * len(get(benchmark)[0].train)
