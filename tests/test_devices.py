"""Devices without float64, CUDA graphs or compiled code: Apple's GPUs, and a stand-in for them on other machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import stand_in
import torch
from torch import nn
from torch.utils import backend_registration

import evcl
from evcl._core import devices
from evcl._core.randomness import GeneratorNoise, HostNoise, generator
from evcl._core.ranks import joined
from evcl.experiments import where
from evcl.methods import METHODS

SAMPLE = ("evcl", "er", "kfac-ewc", "vcl-kcenter-coreset", "gvcl-film", "progressive")
OTHERS = [name for name, one in METHODS.items() if not one.jointly and name not in SAMPLE]
OTHERS = [name for name in OTHERS if not name.startswith(("plugin-", "huber"))]  # methods of the tests
apple = pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs an Apple GPU")


@pytest.fixture
def limited():
    """From its call on, the CPU has no float64 and no compiled code."""
    yield lambda: devices.LIMITED.add("cpu")
    devices.LIMITED.discard("cpu")


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has an Apple GPU")
def test_without_an_apple_gpu_mps_is_refused_in_one_line(evcl, tmp_path):
    import evcl as package

    with pytest.raises(package.EvclError, match="device 'mps' cannot be used here") as error:
        package.EVCL(package.nn.mlp(4, [8]), device="mps")
    assert "\n" not in str(error.value)
    with pytest.raises(package.EvclError, match="device 'mps' cannot be used here"):
        package.EVCL(package.nn.mlp(4, [8])).to("mps")
    status, _, err = evcl("run", "split-digits", "--device", "mps")
    assert status == 2
    assert "device mps cannot be used: torch finds no Apple GPU here" in err


def test_what_evcl_run_takes_on_mps(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert where("mps", None) == ("mps", "fp32")
    assert where("mps", "fp32") == ("mps", "fp32")
    with pytest.raises(evcl.EvclError, match="precision on mps must be one of fp32, not 'bf16'"):
        where("mps", "bf16")
    with pytest.raises(evcl.EvclError, match="device mps is for this machine only: use --engine local"):
        where("mps", None, elsewhere=True)
    assert where("auto", None)[0] in ("cpu", "cuda")
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(evcl.EvclError, match="several processes cannot train on mps together"), joined("mps"):
        pass


def test_what_a_device_without_float64_refuses(limited):
    network = evcl.nn.mlp(4, [8])
    wide, low = evcl.EVCL(network, dtype=torch.float64), evcl.EVCL(network, precision="bf16")
    limited()
    with pytest.raises(evcl.EvclError, match="has no float64"):
        wide.to("cpu")
    with pytest.raises(evcl.EvclError, match="trains in float32 only"):
        low.to("cpu")
    with pytest.raises(evcl.EvclError, match=r"device 'cpu' has no float64: use dtype=torch\.float32"):
        evcl.EVCL(network, dtype=torch.float64)
    with pytest.raises(evcl.EvclError, match="device 'cpu' has no float64"):
        evcl.EVCL(nn.Sequential(nn.utils.skip_init(nn.Linear, 4, 8, dtype=torch.float64)))
    with pytest.raises(evcl.EvclError, match="device 'cpu' trains in float32 only: use precision='fp32'"):
        evcl.EVCL(network, precision="bf16")

    class Alone:
        rank, size = 0, 1

    with pytest.raises(evcl.EvclError, match="several processes cannot train on cpu together"):
        evcl.EVCL(network).share(Alone()).learn((stand_in.X, stand_in.Y))


# --- learning --------------------------------------------------------------------------------------------------------


def test_nothing_compiled_is_used(limited):
    limited()
    learner = evcl.EVCL(evcl.nn.mlp(4, [8]), epochs=2)
    learner.learn((stand_in.X, stand_in.Y))
    assert {epoch.path for epoch in learner.history["0"]} == {"autograd"}


def test_noise_drawn_on_the_host_is_that_of_a_cpu():
    sources = [[generator(seed, "noise") for seed in range(2)] for _ in range(2)]
    here, there = GeneratorNoise(sources[0]), HostNoise(GeneratorNoise(sources[1]))
    for draw in ("normal_", "uniform_"):
        wanted = getattr(here, draw)(torch.empty(2, 7, 3))
        into = torch.empty(2, 3, 7).mT  # not contiguous
        assert getattr(there.shared(), draw)(into) is into
        assert torch.equal(into, wanted)


def test_adam_without_float64_is_adam(limited):
    """Rates per replica, which torch's fused kernel does not take."""
    from evcl.training.rules import Adam

    ends = []
    for k in range(2):
        if k:
            limited()
        weights = torch.ones(2, 5)
        adam = Adam(weights, torch.tensor([[0.1], [0.01]]))
        for k in range(50):
            adam.step(torch.linspace(-1, 1, 5).expand(2, 5) + 0.1 * k * weights, torch.empty(2, 5))
        ends.append(weights)
    torch.testing.assert_close(*ends)


def check(folder, method, device):
    """What another device has learned is what a CPU learns, and a CPU predicts the same from its file."""
    found = dict(np.load(folder / f"{method}.npz", allow_pickle=True))
    wanted = stand_in.learned(method, "cpu", folder)
    for name, value in wanted.items():
        if value is not None:
            np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-3, err_msg=f"{method}: {name}")
    loaded = evcl.load(folder / f"{method} {device}.safetensors", stand_in.network(method))
    np.testing.assert_allclose(loaded.predict_proba(stand_in.X, task="a"), found["p"], rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this version of torch has no devices written in Python",
)
@pytest.mark.full
@pytest.mark.parametrize(
    "methods", [pytest.param(SAMPLE, id="some"), pytest.param(OTHERS, id="others", marks=pytest.mark.soak)]
)
def test_methods_learn_on_a_device_without_float64_what_they_learn_on_a_cpu(methods, tmp_path):
    source = Path(evcl.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, stand_in.__file__, str(tmp_path), *methods]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for method in methods:
        check(tmp_path, method, stand_in.NAME)
    found = np.load(tmp_path / "stream.npz")["accuracy"]
    np.testing.assert_allclose(found, stand_in.streamed("cpu")["accuracy"], atol=0.03)


@apple
@pytest.mark.parametrize("method", SAMPLE)
def test_an_apple_gpu_learns_what_a_cpu_learns(method, tmp_path):
    np.savez(tmp_path / f"{method}.npz", **stand_in.learned(method, "mps", tmp_path))
    check(tmp_path, method, "mps")


@apple
def test_the_command_on_an_apple_gpu(evcl, tmp_path):
    options = ("run", "split-digits", "--device", "mps", "--seeds", "2", "--epochs", "2", "--tasks", "2")
    status, out, err = evcl(*options, "--out", tmp_path / "run")
    assert status == 0, err
    assert "result: " in out


@apple
def test_inputs_and_learners_move_to_and_from_an_apple_gpu():
    x, y = torch.tensor(stand_in.X), stand_in.Y
    learner = evcl.EVCL(evcl.nn.mlp(4, [8]), epochs=3)
    learner.learn((x, y))
    before = learner.predict_proba(x)
    found = learner.to("mps").predict_proba(x.to("mps"))
    assert found.device.type == "mps"
    torch.testing.assert_close(found.cpu(), before, rtol=1e-3, atol=1e-3)
    learner.learn((x.to("mps"), 1 - y))
    torch.testing.assert_close(learner.to("cpu").predict_proba(x, task=0), before, rtol=0, atol=0.3)
