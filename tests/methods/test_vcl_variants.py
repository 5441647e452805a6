"""GVCL, improved VCL and TD-VCL: their terms by definition, what they start from, and VCL as their simplest case."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from small_runs import F64, assert_springs, by_sign, first_fit, learned, round_of, run_of
from torch import nn

import evcl
from evcl.methods import Mixed, TaskData
from evcl.methods.gvcl import ScaledKL
from evcl.methods.kl import KL
from evcl.methods.redraw import redrawn
from evcl.nn import Gaussian, outputs


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


def test_with_strength_1_it_is_the_kl_where_the_prior_is_no_wider_than_the_first(generator):
    q, prior, first = some(generator)
    torch.testing.assert_close(ScaledKL(prior, first, 1.0, 0.3).loss(q), KL(prior, 0.3).loss(q), rtol=1e-12, atol=0)
    wider = Gaussian(prior.mean, prior.log_std + 3)
    assert (ScaledKL(wider, first, 1.0, 0.3).loss(q) > KL(wider, 0.3).loss(q) + 1).all()
    same = Gaussian(prior.mean, (-0.5 * first.log()).expand_as(prior.mean))  # nothing was added: no strength matters
    torch.testing.assert_close(ScaledKL(same, first, 1e3, 0.3).loss(q), KL(same, 0.3).loss(q), rtol=1e-12, atol=0)


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


# --- improved VCL, and GVCL with redraw: what the drawn weights are, and what is left alone --------------------------


TRUNK = ("1.weight", "1.bias")


def improved(method="improved-vcl", network=None, **given):
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
    run = improved(redraw=redraw)
    run.learn([by_sign(0)])
    before, start = drawn(run, head=1)
    for name in (*TRUNK, "head 1.weight", "head 1.bias"):
        assert (before[name][0] != start[name][0]).all(), name
    for name in ("head 0.weight", "head 0.bias"):
        assert all(torch.equal(a, b) for a, b in zip(before[name], start[name], strict=True)), name


def test_initial_is_the_distribution_of_initial_weights():
    run = improved(redraw="initial", init_std=0.05)
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
    run = improved(redraw="posterior")
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
    run = improved(network=Layers(), redraw="initial")
    run.learn([by_sign(0)])
    before, start = drawn(run, head=0)
    assert torch.equal(before["norm.weight"][0], start["norm.weight"][0])
    rows = (before["embedding.weight"][0] == start["embedding.weight"][0]).all(2)
    assert rows.tolist() == [[False, False, True, False]] * 2


def means(method, **given):
    run = improved(method, epochs=4, tempering=0.1, **given)
    for k in range(2):
        run.learn([by_sign(k)])
    return run.network.posterior.mean


def test_a_plain_network_made_of_it_has_the_padding_row_of_the_first():
    """That row is not a weight, so that what is drawn for it must not show."""
    learner = evcl.Learner(Layers(), "improved-vcl", epochs=1, dtype=F64)
    x = torch.tensor([[0.0, 1.0, 2.0], [2.0, 2.0, 1.0]] * 5, dtype=F64)
    for _ in range(2):
        learner.learn(x, [0, 1] * 5)
    q = learner.state.run.network.posterior
    wanted = outputs(learner.state.run.network, q.mean, learner.state.run.network.layout, x.unsqueeze(0), [1])[0]
    torch.testing.assert_close(learner.mean_network("1")(x), wanted)


def test_a_later_task_starts_there_and_the_first_does_not():
    """Without a draw, improved VCL is VCL, and GVCL as it was."""
    vcl = means("vcl")
    assert torch.equal(means("improved-vcl", redraw="none"), vcl)
    for redraw in ("initial", "posterior"):
        assert (means("improved-vcl", redraw=redraw) - vcl).abs().max() > 0.01
        assert (means("gvcl", redraw=redraw) - means("gvcl")).abs().max() > 0.01
    run, other = improved(redraw="initial", tempering=0.1), improved("vcl", tempering=0.1)
    for one in (run, other):
        one.learn([by_sign(0)])
    assert torch.equal(run.network.posterior.mean, other.network.posterior.mean)
    still = improved(redraw="initial", tempering=0.1, lr=1e-12)
    still.learn([by_sign(0)])
    _, start = drawn(still, head=0)
    still.learn([by_sign(1)])
    torch.testing.assert_close(
        still.network.layout.views(still.network.posterior.mean)["1.weight"], start["1.weight"][0]
    )


# --- TD-VCL ----------------------------------------------------------------------------------------------------------


def data(k, n=40, heads=1):
    source = torch.Generator().manual_seed(k)
    x = torch.randn(1, n, 5, generator=source, dtype=F64)
    return TaskData(x, (x[:, :, k % 5] > 0).long(), k % heads, task=k)


made = partial(run_of, "td-vcl", hidden=(6,), usual={"epochs": 2, "batch_size": 10})


def test_after_n_tasks_its_n_anchors_are_the_n_posteriors():
    """Newest first, to the bit; then the oldest is dropped, and until then the first prior is the oldest."""
    run, posteriors = made(anchors=3), []
    prior = run.memory.prior.snapshot()
    for k in range(5):
        run.learn([data(k)])
        posteriors.insert(0, run.network.posterior.snapshot())
        found = (run.memory.prior, *run.memory.older)
        wanted = [*posteriors, prior][:3]
        assert len(found) == min(k + 2, 3)
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a.mean, b.mean)
            assert torch.equal(a.log_std, b.log_std)
        assert [task.task for task in run.memory.kept] == list(range(max(0, k - 1), k + 1))
    assert all((a.mean - b.mean).abs().max() > 1e-3 for a, b in pairwise(posteriors))


@pytest.mark.parametrize("decay", [0.0, 0.4, 1.0])
def test_its_objective_is_that_of_the_definition(decay):
    """With all rows kept: the mean over batches of any losses, and the terms, are a multiple of N_t L_t."""
    run = made(anchors=3, anchor_decay=decay, memory=1000, tempering=0.2, batch_size=12)
    sizes = [30, 50, 40, 20]
    for k in range(3):
        run.learn([data(k, sizes[k])])
    fit = first_fit(run, [data(3, sizes[3])])
    w = [decay**k / sum(decay**j for j in range(3)) for k in range(3)]
    c = {3: 1.0, 2: w[1] + w[2], 1: w[2]}
    assert fit.sampler == Mixed(0.5, 1)
    assert [task.task for task in fit.data] == [3, 1, 2]
    source = torch.Generator().manual_seed(0)
    nll = [torch.rand(task.y.shape[1], generator=source, dtype=F64) for task in fit.data]  # a loss for every row
    new, *old = (
        one if task.weights is None else one * task.weights[0] for one, task in zip(nll, fit.data, strict=True)
    )
    batch = 0.5 * new.mean() + 0.5 * torch.cat(old).mean()
    wanted = sum(c[task.task] * one.sum() for one, task in zip(nll, fit.data, strict=True))
    torch.testing.assert_close(batch * sizes[3] / 0.5, wanted)
    q = run.network.posterior.map(lambda t: t + 0.1)
    anchors = (run.memory.prior, *run.memory.older)
    kls = sum(w_k * 0.2 * q.kl(anchor) for w_k, anchor in zip(w, anchors, strict=True))
    torch.testing.assert_close(sum(term.loss(q) for term in fit.terms) * sizes[3] / 0.5, kls)
    assert_springs(fit.terms, q)


@pytest.mark.parametrize("rows", [2, 8, 9, 30])
def test_a_task_smaller_than_a_batch_counts_as_much_as_its_rows(rows):
    """Half of every batch is new, also of the last one, which has fewer rows: the weights of kept rows rely on it."""
    run = made(memory=20)
    run.learn([data(0, 40)])
    fit = first_fit(run, [data(1, rows)])
    order = fit.sampler([rows, 20], 16, torch.Generator().manual_seed(0))
    assert [int((batch < rows).sum()) * 2 for batch in order.split(16)] == [len(batch) for batch in order.split(16)]


def test_kept_rows_stand_for_all_rows_of_their_task():
    run = made(memory=8)
    run.learn([data(0, 40)])
    (kept,) = run.memory.kept
    assert kept.weights.tolist() == [[5.0] * 8]
    rows = {tuple(row) for row in data(0, 40).x[0].tolist()}
    assert {tuple(row) for row in kept.x[0].tolist()} < rows
    assert len(set(map(tuple, kept.x[0].tolist()))) == 8


def test_anchors_of_another_beta_are_converted():
    """The precision that an anchor added to the first prior is in units of the beta that it was trained with."""
    run = made(anchors=2, tempering="auto", prior_std=1.0)
    for k in range(2):
        run.learn([data(k)])
    fit = first_fit(run, [data(2)])
    now = (fit.terms[0].weight + fit.terms[1].weight) * 40 / 0.5
    for term, anchor, before in zip(
        fit.terms, (run.memory.prior, *run.memory.older), (run.memory.beta, *run.memory.betas), strict=True
    ):
        used = before > 0
        added = ((-2 * anchor.log_std).exp() - 1).clamp_min(0) * before / now
        torch.testing.assert_close(((-2 * term.prior.log_std).exp() - 1)[used], added[used])
        assert not used[:, run.network.layout.spans["head 1.weight"]].any()
        assert used[:, run.network.layout.spans["1.weight"]].all()


def test_with_one_anchor_it_is_vcl_and_with_more_it_is_not():
    def ended(method, **given):
        return learned(method, map(data, range(3)), **made.keywords, **given).network.posterior

    vcl, naive = ended("vcl", tempering=0.05), ended("naive")
    assert torch.equal(ended("td-vcl", anchors=1, tempering=0.05).mean, vcl.mean)
    found = [
        ended("td-vcl", anchors=n, tempering=0.05, anchor_decay=decay).mean
        for n, decay in ((2, 0.5), (3, 0.5), (3, 1.0))
    ]
    for i, one in enumerate(found):
        for other in (*found[:i], vcl.mean, naive.mean):
            assert (one - other).abs().max() > 1e-3


def test_tasks_that_were_learned_jointly_are_of_one_age():
    run = made(anchors=2, memory=10)
    run.learn([data(0), data(1, heads=2)])
    fit = first_fit(run, [data(2), data(3, heads=2)])
    assert fit.sampler == Mixed(0.5, 2)
    assert [task.task for task in fit.data] == [2, 3, 0, 1]
    assert torch.equal(fit.data[2].weights, fit.data[3].weights)
    run.learn([data(2), data(3, heads=2)])
    assert [task.task for task in run.memory.kept] == [2, 3]
