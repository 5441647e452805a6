"""native.c against plain operations, and a machine on which it cannot be compiled."""

from __future__ import annotations

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from checks import run_of

import evcl
from evcl._core.randomness import GeneratorNoise, generator, normal_table
from evcl.kernels.native import native
from evcl.training import TaskData

needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler")


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EVCL_CACHE", str(tmp_path))
    return tmp_path


def turn_off(monkeypatch):
    monkeypatch.setenv("EVCL_NATIVE", "0")


def begin_anew(monkeypatch):
    """As in another process: this one knows the library by the command that compiles it."""
    monkeypatch.setenv("CC", os.environ.get("CC", "cc") + " ")


def trained(method, rates=(1e-3,), heads=1, steps=3, **given):
    """The state after two tasks, and one of both of them where there are two heads, of a few steps each."""
    source = torch.Generator().manual_seed(0)
    each = [{"epochs": 1, "batch_size": 16, "lr": lr, **given} for lr in rates]
    run, tasks = run_of(method, evcl.nn.mlp(20, [30, 10]), each, range(len(rates))), []
    for k in range(2):
        if k < heads:
            run.add_head(10, 3 + k)
        x = torch.rand(1, 16 * steps - 5, 20, generator=source)
        x[..., 0] = 0  # a weight without data
        tasks.append(TaskData(x, torch.arange(x.shape[1]).unsqueeze(0) % 3, k if heads == 2 else 0))
        run.learn([tasks[-1]], noise=GeneratorNoise([generator(r, "test") for r in range(len(rates))]))
    if heads == 2:
        run.learn(tasks, noise=GeneratorNoise([generator(r, "test") for r in range(len(rates))]))
    return run.tensors()


@needs_compiler
@pytest.mark.parametrize("method", ["evcl", "vcl", "ewc", "naive"])
@pytest.mark.parametrize("rates", [(1e-3,), (1e-3, 1e-2, 1e-4)])
@pytest.mark.parametrize("heads", [1, 2])
def test_compiled_training_is_plain_training(method, rates, heads, monkeypatch):
    """Up to rounding: Adam divides by what may be a rounding error, so few steps and a small part of them."""
    assert native() is not None
    fast = trained(method, rates, heads)
    turn_off(monkeypatch)
    assert native() is None
    slow = trained(method, rates, heads)
    for name, value in slow.items():
        off = (fast[name] - value).abs() > 1e-5 + 1e-3 * value.abs()
        assert off.double().mean() < 0.01, name


@needs_compiler
@pytest.mark.parametrize("method", ["evcl", "vcl"])
def test_compiled_natural_steps_are_plain_ones(method, monkeypatch):
    given = {"std_update": "natural", "std_rate": 0.02, "rates": (1e-3, 1e-2), "steps": 30}
    fast = trained(method, **given)
    turn_off(monkeypatch)
    slow = trained(method, **given)
    torch.testing.assert_close(fast["posterior.log_std"], slow["posterior.log_std"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_compiler), False])
@pytest.mark.parametrize("rule", ["adam", "natural"])
def test_a_weight_without_data_keeps_its_prior_to_the_last_bit(compiled, rule, monkeypatch):
    if not compiled:
        turn_off(monkeypatch)
    found = trained("evcl", steps=20, std_update=rule, init_std=0.3, prior_std=0.3)
    layout = evcl.nn.bayesianize(evcl.nn.mlp(20, [30, 10])).layout
    log_std = layout.view(found["posterior.log_std"][:, : layout.size], "1.weight")
    assert (log_std[..., 0] == torch.tensor(0.3, dtype=torch.float64).log().float()).all()
    assert (log_std[..., 1:] != log_std[0, 0, 0]).any()


@needs_compiler
def test_it_is_compiled_once_and_loaded_from_the_cache(no_cache, monkeypatch):
    assert native() is not None
    (found,) = (no_cache / "native").glob("*.so")
    made = found.stat()
    begin_anew(monkeypatch)
    assert native() is not None
    assert (found.stat().st_mtime_ns, found.stat().st_ino) == (made.st_mtime_ns, made.st_ino)


@needs_compiler
@pytest.mark.parametrize("size", [0, 5000])
def test_a_damaged_file_in_the_cache_is_made_anew(size, no_cache, monkeypatch):
    assert native() is not None
    (found,) = (no_cache / "native").glob("*.so")
    whole = found.read_bytes()
    found.unlink()  # the library that is loaded stays as it is
    found.write_bytes(whole[:size])
    begin_anew(monkeypatch)
    assert native() is not None
    assert len(found.read_bytes()) == len(whole)


@needs_compiler
def test_a_folder_that_others_can_write_to_is_not_loaded_from(no_cache):
    (no_cache / "native").mkdir()
    (no_cache / "native").chmod(0o777)
    assert native() is None


@needs_compiler
def test_threads_that_compile_at_once_all_get_it(no_cache):
    with ThreadPoolExecutor(4) as pool:
        assert all(found is not None for found in pool.map(lambda _: native(), range(4)))


@pytest.mark.parametrize("compiler", ["no-such-compiler", sys.executable], ids=["missing", "broken"])
def test_without_a_working_compiler_everything_works(compiler, no_cache, monkeypatch):
    monkeypatch.setenv("CC", compiler)
    assert native() is None
    assert trained("evcl")["posterior.mean"].isfinite().all()
    assert not [path for path in no_cache.rglob("*") if path.is_file()]


@needs_compiler
@pytest.mark.parametrize("rule", ["adam", "natural"])
def test_a_loss_that_is_lost_is_seen(rule):
    x = torch.full((1, 20, 4), 1e30)
    run = run_of("evcl", evcl.nn.mlp(4, [5]), {"epochs": 1, "std_update": rule}, heads=(5, [2]))
    with pytest.raises(evcl.EvclError, match="not a number"):
        run.learn([TaskData(x, torch.zeros(1, 20).long(), 0)])


def test_the_table_of_normal_numbers():
    table = normal_table(torch.float64)
    assert len(table) == 65536
    assert float(table.mean()) == pytest.approx(0, abs=1e-12)
    for power, moment in ((2, 1), (4, 3), (6, 15)):
        assert float(table.pow(power).mean()) == pytest.approx(moment, rel=2e-3)
    normal = torch.distributions.Normal(0, 1)
    for z in (-3.0, -1.0, 0.5, 2.0):
        assert float((table < z).double().mean()) == pytest.approx(float(normal.cdf(torch.tensor(z))), abs=2e-5)


def test_noise_is_normal_in_every_place(generator):
    """Four numbers come from one draw of 64 bits: each of them, and no two of them together."""
    draws = GeneratorNoise([generator]).normal_(torch.empty(1, 40_000, 4))[0]
    assert (draws.mean(0).abs() < 0.025).all()
    torch.testing.assert_close(torch.cov(draws.T), torch.eye(4), rtol=0, atol=0.03)
    assert (draws.min(0).values < -3).all()
    assert (draws.max(0).values > 3).all()
