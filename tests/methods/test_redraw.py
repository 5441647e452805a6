"""Improved VCL, and GVCL with `redraw`: what the drawn weights are, and what is left alone."""

from __future__ import annotations

import math

import pytest
import torch
from small_runs import F64, by_sign, round_of, run_of
from torch import nn

import evcl
from evcl.methods.redraw import redrawn
from evcl.nn import outputs

TRUNK = ("1.weight", "1.bias")


def made(method="improved-vcl", network=None, **given):
    """Two seeds."""
    hidden = (200,) if network is None else (6,)
    return run_of(method, 2, network, hidden, usual={"epochs": 3, "batch_size": 10}, **given)


def drawn(run, head, number=1):
    """The weights before a task of this head, and those that it starts from: (means, log_stds) by name."""
    network, q = run.network, run.network.posterior
    start = redrawn(round_of(run, [by_sign(1, head)], number), run.settings)
    each = [(network.layout.views(one.mean), network.layout.views(one.log_std)) for one in (q, start)]
    return [{name: (mean[name].clone(), log_std[name].clone()) for name in mean} for mean, log_std in each]


@pytest.mark.parametrize("redraw", ["initial", "posterior"])
def test_weights_that_the_task_does_not_train_stay(redraw):
    run = made(redraw=redraw)
    run.learn([by_sign(0)])
    before, start = drawn(run, head=1)
    for name in (*TRUNK, "head 1.weight", "head 1.bias"):
        assert (before[name][0] != start[name][0]).all(), name
    for name in ("head 0.weight", "head 0.bias"):
        assert all(torch.equal(a, b) for a, b in zip(before[name], start[name], strict=True)), name


def test_initial_is_the_distribution_of_initial_weights():
    run = made(redraw="initial", init_std=0.05)
    run.learn([by_sign(0)])
    before, start = drawn(run, head=0)
    again = drawn(run, head=0)[1]
    mean = start["1.weight"][0]
    assert torch.equal(mean, again["1.weight"][0])  # a function of seed and round
    assert not torch.equal(mean, drawn(run, head=0, number=2)[1]["1.weight"][0])
    assert not torch.equal(mean[0], mean[1])  # another draw for every seed
    assert mean.abs().max() <= math.sqrt(6 / 5)
    assert mean.std().item() == pytest.approx(math.sqrt(2 / 5), rel=0.05)
    for name in TRUNK:
        torch.testing.assert_close(start[name][1], before[name][1].clamp(max=math.log(0.05)))
    assert (before["1.weight"][1] > math.log(0.05)).any()


def test_posterior_draws_are_those_of_the_posterior():
    run = made(redraw="posterior")
    run.learn([by_sign(0)])
    before, start = drawn(run, head=0)
    noise = (start["1.weight"][0] - before["1.weight"][0]) / before["1.weight"][1].exp()
    assert noise.mean().item() == pytest.approx(0, abs=0.1)
    assert noise.std().item() == pytest.approx(1, abs=0.1)


class Layers(nn.Module):
    """An embedding with a padding row, and a norm."""

    def __init__(self):
        super().__init__()
        weight = torch.linspace(-1, 1, 24).view(4, 6)
        self.embedding = nn.Embedding.from_pretrained(weight, freeze=False, padding_idx=2)
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(self.embedding(x.abs().long() % 4).mean(1))


def test_a_norm_and_a_padding_row_keep_their_values():
    run = made(network=Layers(), redraw="initial")
    run.learn([by_sign(0)])
    before, start = drawn(run, head=0)
    assert torch.equal(before["norm.weight"][0], start["norm.weight"][0])
    rows = (before["embedding.weight"][0] == start["embedding.weight"][0]).all(2)
    assert rows.tolist() == [[False, False, True, False]] * 2


def means(method, **given):
    run = made(method, epochs=4, tempering=0.1, **given)
    for k in range(2):
        run.learn([by_sign(k)])
    return run.network.posterior.mean


def test_a_plain_network_made_of_it_has_the_padding_row_of_the_first():
    """That row is not a weight, so that what is drawn for it must not show."""
    learner = evcl.Learner(Layers(), "improved-vcl", epochs=1, dtype=F64)
    x = torch.tensor([[0.0, 1.0, 2.0], [2.0, 2.0, 1.0]] * 5, dtype=F64)
    for _ in range(2):
        learner.learn(x, [0, 1] * 5)
    q = learner.parts.run.network.posterior
    wanted = outputs(learner.parts.run.network, q.mean, learner.parts.run.network.layout, x.unsqueeze(0), [1])[0]
    torch.testing.assert_close(learner.mean_network("1")(x), wanted)


def test_a_later_task_starts_there_and_the_first_does_not():
    """Without a draw, improved VCL is VCL, and GVCL as it was."""
    vcl = means("vcl")
    assert torch.equal(means("improved-vcl", redraw="none"), vcl)
    for redraw in ("initial", "posterior"):
        assert (means("improved-vcl", redraw=redraw) - vcl).abs().max() > 0.01
        assert (means("gvcl", redraw=redraw) - means("gvcl")).abs().max() > 0.01
    run, other = made(redraw="initial", tempering=0.1), made("vcl", tempering=0.1)
    for one in (run, other):
        one.learn([by_sign(0)])
    assert torch.equal(run.network.posterior.mean, other.network.posterior.mean)
    still = made(redraw="initial", tempering=0.1, lr=1e-12)
    still.learn([by_sign(0)])
    _, start = drawn(still, head=0)
    still.learn([by_sign(1)])
    torch.testing.assert_close(
        still.network.layout.views(still.network.posterior.mean)["1.weight"], start["1.weight"][0]
    )
