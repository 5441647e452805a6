"""The written-out training pass of a feed-forward network, against autograd on the network itself."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from checks import run_of
from torch import nn

import evcl
from evcl._core.randomness import GeneratorNoise
from evcl.methods import Fit, Round
from evcl.nn import bayesianize
from evcl.nn.chain import Chain, find_chain, find_places, padded
from evcl.training import Pool, Step, TaskData
from evcl.training.step import Bound, ByAutograd

linear = partial(nn.utils.skip_init, nn.Linear)


class Handed:
    """Noise that is a function of the replica and the example: two heads draw what their one layer draws."""

    def normal_(self, out):
        r, b, _ = out.shape
        return out.copy_(torch.linspace(-2, 2, r * b).view(r, b, 1))


def passes(replicas, bayesian, bias, heads, shared, dtype=torch.float64, low=None, weighted=False):
    """[(nll, gradients)] of the chain and of autograd, for the same rows and noise; the last head may have weights."""
    source = torch.Generator().manual_seed(0)
    plain = nn.Sequential(
        nn.Flatten(), linear(6, 5, bias=bias), nn.ReLU(), linear(5, 4, bias=bias), nn.ReLU(inplace=True)
    )
    method, given = ("evcl", {"init_std": 0.3}) if bayesian else ("ewc", {})
    run = run_of(method, plain, given, range(replicas), dtype=dtype)
    tasks = []
    for k in range(heads):
        x = torch.randn(1 if shared else replicas, 9, 2, 3, generator=source, dtype=dtype)
        x[:, 0] = 0  # without a bias there is no variance here
        y = torch.arange(9).expand(len(x), 9) % (2 + k)
        w = torch.rand(len(x), 9, generator=source, dtype=dtype) if weighted and k == heads - 1 else None
        tasks.append(TaskData(x, y, run.add_head(4, 2 + k), w))
    network, pool = run.network, Pool(tasks, run.classes)
    layout = network.layout.part(network.names_of(pool.heads))
    rows = torch.stack([torch.randperm(len(pool), generator=source)[:8] for _ in range(replicas)])
    mean, log_std = (None if t is None else network.layout.gather(t, layout) for t in
                     (network.posterior.mean, network.posterior.log_std))  # fmt: skip
    values = torch.stack([mean, (2 * log_std).exp()]) if bayesian else mean.unsqueeze(0)
    chain = find_chain(network, pool.x)
    found = []
    for kind in (Chain, ByAutograd):
        grads = torch.full_like(values, 7.0)
        if kind is Chain:
            gradients = Chain(find_places(chain, layout, pool.heads), values, grads, pool, low)
        else:
            gradients = ByAutograd(Bound(network, layout, values, grads), pool)
        nll = gradients(rows, Handed())
        found.append((nll.clone(), grads))
    return found


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("bayesian", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("shared", [True, False])
def test_a_chain_is_autograds(replicas, bayesian, bias, heads, shared):
    fast, slow = passes(replicas, bayesian, bias, heads, shared)
    torch.testing.assert_close(fast[0], slow[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(fast[1], slow[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("bayesian", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("form", ["float64", "float32", "compiled"])
def test_weights_in_a_chain_are_those_of_autograd(replicas, bayesian, shared, form, monkeypatch):
    monkeypatch.setenv("EVCL_NATIVE", str(int(form == "compiled")))
    dtype = torch.float64 if form == "float64" else torch.float32
    close = {"rtol": 1e-10, "atol": 1e-12} if form == "float64" else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(*passes(replicas, bayesian, True, 2, shared, dtype, weighted=True), **close)


def test_a_chain_in_bf16_is_close_and_keeps_float32():
    rough, exact = passes(2, True, True, 1, True, dtype=torch.float32, low=torch.bfloat16)
    for a, b in zip(rough, exact, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.05 * b.norm()
        assert not torch.equal(a, b)


def test_what_is_a_chain():
    x = torch.zeros(1, 9, 6)

    def known(*modules, like=x):
        return find_chain(bayesianize(nn.Sequential(*modules)), like) is not None

    assert find_chain(bayesianize(evcl.nn.mlp(6, [4, 3])), x) is not None
    assert known(linear(6, 4), nn.ReLU())
    assert known(nn.Flatten(), linear(6, 4), nn.ReLU(), like=x.view(1, 9, 2, 3))
    assert not known(linear(6, 4), nn.ReLU(), like=x.view(1, 9, 1, 6))  # along a sequence
    assert not known(linear(6, 4), nn.ReLU(), like=x[..., :5])
    assert not known(linear(6, 4), nn.Tanh())
    assert not known(linear(6, 4), nn.ReLU(), nn.Dropout())
    assert not known(linear(6, 4))
    shared = linear(6, 6)
    assert not known(shared, nn.ReLU(), shared, nn.ReLU())
    watched = bayesianize(nn.Sequential(linear(6, 4), nn.ReLU()))
    watched.trunk[0].register_forward_hook(lambda *_: None)
    assert find_chain(watched, x) is None


def test_a_step_takes_no_memory():
    """Once it has run: of batches of both sizes."""
    given = {"batch_size": 8, "epochs": 1, "lr": 0.005, "std_rate": 0.01}
    run = run_of("evcl", evcl.nn.mlp(6, [5, 5]), given, heads=(5, [2]))
    task = TaskData(torch.rand(1, 20, 6, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 20).long(), 0)
    run.learn([task])
    pool, network = Pool([task], run.classes), run.network
    round_ = Round(1, [task], network, network.posterior, run.seen, run.seeds, run.likelihood)
    terms = next(run.method.learn(run.memory, round_, run.settings)).terms
    chain = find_chain(network, pool.x)
    q = network.posterior.map(torch.clone, network.layout)
    step = Step(network, q, Fit([task], terms=terms), run.settings, pool, chain)
    source = GeneratorNoise([torch.Generator().manual_seed(0)])
    for size in (8, 4):
        rows = torch.arange(size).unsqueeze(0)
        step(rows, source)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            step(rows, source)
        taken = {e.key: e.self_cpu_memory_usage for e in profile.key_averages() if e.self_cpu_memory_usage}
        assert all(abs(taken) <= 64 for taken in taken.values()), taken  # a number on its way into an operation


def test_padding_rounds_widths_and_leaves_classes():
    run = run_of("naive", evcl.nn.mlp(6, [5, 3]), heads=(3, [2]))
    chain = find_chain(run.network, torch.zeros(1, 9, 6))
    names = run.network.names_of([0])
    layout = run.network.layout.part(names, padded(chain, run.network.layout, [0], 4), 4)
    assert [layout.stored[name] for name in names] == [(8, 8), (8,), (4, 8), (4,), (2, 4), (2,)]
    assert layout.size % 4 == 0
    flat = run.network.posterior.mean
    taken = run.network.layout.gather(flat, layout)
    assert taken.count_nonzero() == flat.count_nonzero()
    back = torch.zeros_like(flat)
    run.network.layout.scatter_(back, layout, taken)
    assert torch.equal(back, flat)
