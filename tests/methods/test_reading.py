"""Distillation of a network without heads: a language model keeps what it says of text."""

from __future__ import annotations

import math

import pytest
import small_runs
import torch
import torch.nn.functional as F
from torch import nn

import evcl
from evcl.methods import Round, TaskData
from evcl.methods.data import Minibatch
from evcl.methods.teacher import KEEN, TOLD, protection
from evcl.nn import outputs
from evcl.targets import Energy, NextToken

LETTERS, LENGTH = 5, 8


class Next(nn.Module):
    """The logits of the next letter, from the last one."""

    def __init__(self):
        super().__init__()
        self.letters, self.next = nn.Embedding(LETTERS, 6), nn.Linear(6, LETTERS)

    def forward(self, x):
        return self.next(torch.tanh(self.letters(x[:, :-1]))).flatten(1)


def text(shift, rows=200, letters=LETTERS):
    """[rows, LENGTH]: of two letters in three, the next is `shift` further on; the others are random."""
    source = torch.Generator().manual_seed(0)
    found = torch.randint(0, letters, (rows, LENGTH), generator=source)
    for t in range(1, LENGTH):
        follows = torch.rand(rows, generator=source) < 2 / 3
        found[:, t] = torch.where(follows, (found[:, t - 1] + shift) % letters, found[:, t])
    return found


def learned(method="evcl", likelihood=None, **settings):
    learner = evcl.Learner(Next(), method, likelihood=likelihood or NextToken(), epochs=20, lr=0.02, **settings)
    learner.learn(text(1))
    return learner


def round_of(learner, x):
    run, shown = learner.parts.run, x.unsqueeze(0).float()
    task = TaskData(shown, shown, 1)
    return Round(1, [task], run.network, run.network.posterior, [0], run.seeds, run.likelihood)


@pytest.fixture(scope="module")
def learner():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return learned()


def protected(learner, x, rows=100.0):
    counted = {0: torch.tensor([[rows]])}
    return protection(counted, round_of(learner, x), learner.parts.run.settings)


@pytest.mark.parametrize("rows", [50.0, 1000.0])
def test_how_much_is_told_and_how_much_of_the_prior_is_kept(learner, rows):
    x, run = text(2), learner.parts.run
    z = outputs(run.network, run.network.posterior.mean, run.network.layout, x.unsqueeze(0).float(), [])
    nll = F.cross_entropy(z.view(-1, LETTERS), x[:, 1:].flatten())
    knows = max(0.0, 1 - float(nll) / math.log(LETTERS))
    past = protected(learner, x, rows)
    (loss,) = past.losses
    assert float(loss.strength) == pytest.approx(TOLD * knows * min(1.0, rows / 200), abs=1e-5)
    assert float(past.prior) == pytest.approx((1 - knows) ** KEEN, abs=1e-5)


def test_it_is_the_sum_of_the_kls_of_all_letters(learner):
    x, run = text(1, 30), learner.parts.run
    (loss,) = protected(learner, x).losses
    teacher, network, layout = run.network.posterior.mean, run.network, run.network.layout
    weights = teacher + 0.1 * torch.randn(teacher.shape, generator=torch.Generator().manual_seed(0))
    shown = x.unsqueeze(0).float()
    batch = Minibatch(shown, shown, torch.arange(30).unsqueeze(0))
    old, new = (outputs(network, w, layout, shown, []).view(-1, LETTERS) for w in (teacher, weights))
    t = loss.temperature
    each = F.kl_div((new / t).log_softmax(1), (old / t).softmax(1), reduction="none").sum(1)
    network.bind(weights, None, layout)
    bound = network.weights.mean
    found = loss(network, batch).detach()
    assert network.weights.mean is bound  # the step goes on with its own weights
    assert float(found) == pytest.approx(float(loss.strength) * t**2 * float(each.sum()) / 30, rel=1e-5)
    network.bind(teacher, None, layout)
    assert abs(float(loss(network, batch).detach())) < 1e-6


def test_an_energy_that_is_no_sum_of_cross_entropies_is_not_distilled():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = learned(likelihood=Energy(lambda outputs, y: outputs.square().sum(1)))
    assert protected(plain, text(1)) == ((), 1.0, 1.0)


def test_a_language_model_keeps_its_first_text_and_learns_the_second():
    """The second text has three of the five letters, and naive training forgets what follows the others."""
    first, second, found = text(1), text(1, letters=3), {}
    for method in ("evcl", "naive"):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            one = learned(method)
        before = [float(one.log_likelihood(x).mean()) for x in (first, second)]
        one.learn(second)
        found[method] = [float(one.log_likelihood(x).mean()) - b for x, b in zip((first, second), before, strict=True)]
    assert found["evcl"][0] > found["naive"][0] / 2  # nats lost
    assert found["evcl"][1] > found["naive"][1] / 2  # nats won


def test_seeds_side_by_side_are_as_each_alone():
    found = []
    for seeds in ([0, 1], [0], [1]):
        with torch.random.fork_rng():
            network = Next()
        given = {"heads": (), "features": 1, "usual": {"epochs": 2, "batch_size": 8}}
        run = small_runs.run_of("evcl", network=network, seeds=seeds, options={"likelihood": NextToken()}, **given)
        run.network.whole = (LENGTH - 1) * LETTERS  # outputs
        for k in range(2):
            x = text(k + 1, 24).unsqueeze(0).double()
            run.learn([TaskData(x, x, k, task=k)])
        found.append(run.log_likelihood(TaskData(x, x, 0, task=0)))
    torch.testing.assert_close(found[0], torch.cat(found[1:]))
    assert not torch.allclose(*found[1:], rtol=1e-3)
