"""GVCL: its KL by definition, VCL as one end of it, and online EWC as the other."""

from __future__ import annotations

import math

import pytest
import torch
from small_runs import F64, assert_springs, learned

import evcl
from evcl.methods import TaskData
from evcl.methods.gvcl import ScaledKL
from evcl.nn import Gaussian


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=F64)


def some(generator, r=3, p=40):
    """q, a prior that is narrower than the first prior, and the first prior's precision."""
    first = torch.rand(1, p, generator=generator, dtype=F64) + 0.5
    prior = Gaussian(draw(generator, r, p), -0.5 * (first + draw(generator, r, p).square()).log())
    return Gaussian(draw(generator, r, p), draw(generator, r, p) - 1), prior, first


def test_its_kl_is_that_of_the_definition(generator):
    """Weight by weight, with a prior that is narrower or wider than the first."""
    q, prior, first = some(generator, r=1)
    prior = Gaussian(prior.mean, prior.log_std + (torch.arange(40) % 2) * 2)
    total = 0.0
    for i in range(40):
        v, s, s0 = q.variance()[0, i].item(), prior.variance()[0, i].item(), 1 / first[0, i].item()
        stiff = 1 / s0 + 7 * max(1 / s - 1 / s0, 0)
        total += 0.5 * (v / s + (q.mean - prior.mean)[0, i].item() ** 2 * stiff + math.log(s / v) - 1)
    assert ScaledKL(prior, first, 7.0, 0.1).loss(q).item() == pytest.approx(0.1 * total, rel=1e-12)


@pytest.mark.parametrize("strength", [0.0, 30.0, torch.tensor([[0.5], [3.0], [100.0]], dtype=F64)])
def test_its_springs_are_its_gradients(strength, generator):
    q, prior, first = some(generator)
    weight = torch.tensor([[0.1], [1.0], [2.0]], dtype=F64)
    assert_springs([ScaledKL(prior, first, strength, weight)], q, rtol=1e-10)


def tasks(generator, n=120):
    """Two tasks of one head, with noisy labels."""
    found = []
    for k in range(2):
        x = torch.randn(1, n, 3, generator=generator, dtype=F64)
        y = (x[:, :, k] + 0.3 * x[:, :, 2] + torch.randn(1, n, generator=generator, dtype=F64) > 0).long()
        found.append(TaskData(x, y, 0, task=k))
    return found


def test_strength_1_is_vcl_and_another_is_not(generator):
    def end(method, **given):
        run = learned(
            method, stream, network=evcl.nn.mlp(3, [6]), features=6, usual={}, epochs=4, batch_size=40, **given
        )
        return run.network.posterior.mean

    stream = tasks(generator)
    one, some, more = (end("gvcl", strength=strength) for strength in (1.0, 5.0, 50.0))
    vcl, naive = end("vcl"), end("naive")
    torch.testing.assert_close(one, vcl, rtol=1e-6, atol=1e-8)
    for a, b in ((one, some), (some, more), (one, more), (some, naive), (more, naive)):
        assert (a - b).abs().max() > 1e-3
