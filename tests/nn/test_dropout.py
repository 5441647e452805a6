"""Dropout in `mlp`: plain torch's on the same draws, off in predictions, and a function of the run's seed alone."""

from __future__ import annotations

import pytest
import torch
from interrupted import assert_stopped_run_ends_the_same
from models import run_of, saved
from torch import nn

import evcl
from evcl._core.randomness import GeneratorNoise, generator
from evcl.benchmarks import BENCHMARKS, Benchmark, Entry, register
from evcl.experiments import configure
from evcl.methods import TaskData
from evcl.nn import bayesianize

F64 = torch.float64


def digits(tasks=2):
    return evcl.benchmarks.get("split-digits", tasks=tasks)


def trained(seeds, method="naive", rounds=2, **dropped):
    how = {"epochs": 2, "batch_size": 20, "lr": 0.01}
    run = run_of(evcl.nn.mlp(6, [12, 12], **dropped), method, seeds, draw=True, dtype=F64, **how)
    run.add_heads(12, [2, 2])
    for k in range(rounds):
        x = torch.randn(1, 50, 6, generator=generator(0, "task", k), dtype=F64)
        run.learn([TaskData(x, (x[:, :, k] > 0).long(), k, task=k)])
    return run


def test_a_dropped_unit_is_0_and_the_others_are_scaled_up():
    network = bayesianize(evcl.nn.mlp(50, [40, 30], dropout=0.5, input_dropout=0.2), init_std=None, dtype=F64)
    x = torch.randn(200, 50, generator=generator(0, "x"), dtype=F64)
    network.weights.noise = GeneratorNoise([generator(0, "noise")])
    found = network(x)
    source = generator(0, "noise")  # the same draws, in the order of the layers
    h = x * (torch.empty_like(x).uniform_(generator=source) >= 0.2) / 0.8
    views = network.layout.views(network.posterior.mean)
    names = list(views)
    for weight, bias in zip(names[::2], names[1::2], strict=True):
        h = torch.relu(h @ views[weight][0].T + views[bias][0])
        keep = torch.empty_like(h).uniform_(generator=source) >= 0.5
        assert 0.45 < float(keep.double().mean()) < 0.55
        h = h * keep / 0.5
    torch.testing.assert_close(found, h)


def test_predictions_drop_nothing():
    dropped, plain = (evcl.nn.mlp(6, [12], dropout=p, input_dropout=p) for p in (0.5, 0.0))
    plain.load_state_dict(dict(zip(plain.state_dict(), dropped.state_dict().values(), strict=True)))
    x = torch.randn(20, 6, generator=generator(0, "x"))
    networks = [bayesianize(one, init_std=None) for one in (dropped, plain)]
    assert torch.equal(*(network(x) for network in networks))
    assert not any(isinstance(m, nn.Dropout) for m in plain)
    assert torch.equal(dropped.eval()(x), plain(x))


def test_torch_s_global_generator_is_neither_used_nor_moved():
    found = []
    for seed in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            found.append(trained([0], dropout=0.5, input_dropout=0.2).network.posterior.mean)
            assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*found)
    assert not torch.allclose(found[0], trained([0]).network.posterior.mean, atol=1e-3)


@pytest.mark.parametrize("method", ["naive", "ewc", "evcl"])
def test_replicas_are_their_solo_runs(method):
    beside = trained([3, 4, 5], method, dropout=0.5, input_dropout=0.2)
    for r in range(3):
        alone = trained([3 + r], method, dropout=0.5, input_dropout=0.2)
        torch.testing.assert_close(
            beside.network.posterior.mean[r], alone.network.posterior.mean[0], rtol=1e-9, atol=1e-10
        )


def test_a_saved_learner_goes_on_dropping(tmp_path):
    first = evcl.Learner(evcl.nn.mlp(64, [20], dropout=0.4, input_dropout=0.1), "naive", seed=3, epochs=2)
    first.learn(digits()[0])
    learners = [first, saved(first, tmp_path, digits()[0].test.x)]
    for learner in learners:
        learner.learn(digits()[1])
    assert torch.equal(*(learner.parts.run.network.posterior.mean for learner in learners))
    without = evcl.Learner(evcl.nn.mlp(64, [20]), "naive", seed=3, epochs=2)
    for task in digits():
        without.learn(task)
    assert not torch.allclose(
        without.parts.run.network.posterior.mean, learners[0].parts.run.network.posterior.mean, atol=1e-3
    )


@pytest.fixture
def benchmark():
    def network():
        return evcl.nn.mlp(64, [20], dropout=0.4, input_dropout=0.1)

    def build(request):
        return Benchmark("dropped", digits(), network=network, seed=request.seed)

    register(Entry("dropped", "digits, with dropout", build, seeded=False))
    yield "dropped"
    BENCHMARKS.remove("dropped")


def test_stopped_within_an_epoch_it_ends_to_the_bit_where_it_would_have(benchmark, tmp_path):
    config = configure(benchmark, "naive", "default", (0, 1), 2, {"epochs": 2, "batch_size": 20})
    assert_stopped_run_ends_the_same(config, tmp_path)


@pytest.mark.parametrize("given", [{"dropout": 1.0}, {"input_dropout": -0.1}, {"dropout": "half"}, {"dropout": True}])
def test_a_wrong_probability_is_refused(given):
    with pytest.raises(evcl.EvclError, match="at least 0 and below 1"):
        evcl.nn.mlp(3, [3], **given)
