"""DER++, A-GEM and EVCL with replay do what their equations say: by hand, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from small_runs import EXAMPLES, INPUTS, assert_weights, first_fit, learned, logits, plain, round_of, run_of, task
from torch import nn
from torch.nn.utils import skip_init

import evcl
from evcl._core.randomness import generator
from evcl.methods import METHODS, TaskData
from evcl.methods.evcl_er import completed, remaining, represented
from evcl.nn import Gaussian

LR, MEMORY, BATCH = 0.05, 12, 10
TWO = [task(0, 0), task(1, 1)]
SGD = {"optimizer": "sgd", "lr": LR, "memory": MEMORY, "batch_size": BATCH, "epochs": 3}


def two_tasks(method, **given):
    """A run that has learned a task, the network as it then was in plain torch, and the fit of the next task."""
    run = run_of(method, **{**SGD, **given})
    run.learn([task(0, 0)])
    return run, plain(run), first_fit(run, [task(1, 1)])


def steps(fit, epochs=3):
    """The rows of each step of the second task."""
    sizes = [one.y.shape[1] for one in fit.data]
    for epoch in range(epochs):
        yield from fit.sampler(sizes, fit.batch, generator(0, "order", 1, epoch)).split(fit.batch)


def cross_entropy(network, one, rows):
    return F.cross_entropy(logits(network, one.x[0, rows], one.head), one.y[0, rows])


def moved(network, grads):
    with torch.no_grad():
        for weight, grad in zip(network.parameters(), grads, strict=True):
            weight.sub_(LR * grad)


def check(run, network):
    run.learn([task(1, 1)])
    assert_weights(run, run.network.posterior.mean, network.state_dict(), rtol=1e-9)


# --- A-GEM -----------------------------------------------------------------------------------------------------------


def test_agem_projects_the_gradient_of_the_new_rows():
    run, network, fit = two_tasks("agem")
    new, kept = task(1, 1), run.memory.kept[0]
    against = 0
    for rows in steps(fit):
        g, k = (
            torch.autograd.grad(loss, list(network.parameters()), materialize_grads=True)
            for loss in (
                cross_entropy(network, new, rows[rows < EXAMPLES]),
                cross_entropy(network, kept, rows[rows >= EXAMPLES] - EXAMPLES),
            )
        )
        product = sum((a * b).sum() for a, b in zip(g, k, strict=True))
        if product < 0:
            against += 1
            part = product / sum((b * b).sum() for b in k)
            g = [a - part * b for a, b in zip(g, k, strict=True)]
        moved(network, g)
    assert 0 < against < 9
    check(run, network)


# --- DER++ -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "beta"), [(0.3, 0.5), (2.0, 0.0), (0.0, 1.5)])
def test_derpp_repeats_labels_and_logits_of_two_draws(alpha, beta):
    run, network, fit = two_tasks("derpp", alpha=alpha, beta=beta)
    new, kept, said = task(1, 1), run.memory.rehearsal.kept[0], run.memory.logits[0]
    torch.testing.assert_close(said[0], logits(network, kept.x[0], 0).detach())
    for rows in steps(fit):
        old, dark = rows[1::4] - EXAMPLES, rows[3::4] - EXAMPLES - MEMORY
        count = len(rows)
        loss = cross_entropy(network, new, rows[::2]) + alpha * 4 / count * (
            (logits(network, kept.x[0, dark], 0) - said[0, dark]).square().mean(1).sum()
        )
        loss = loss + beta * 4 * len(old) / count * cross_entropy(network, kept, old)
        moved(network, torch.autograd.grad(loss, list(network.parameters()), materialize_grads=True))
    check(run, network)


def test_derpp_keeps_the_logits_of_the_end_of_a_task():
    run = run_of("derpp", memory=MEMORY)
    run.learn([task(0, 0)])
    kept, said = run.memory.rehearsal.kept[0], run.memory.logits[0]
    run.learn([task(1, 1)])
    later, again = run.memory.rehearsal.kept[0], run.memory.logits[0]
    assert later.y.shape[1] == again.shape[1] == MEMORY // 2
    for row, z in zip(later.x[0], again[0], strict=True):
        (place,) = (kept.x[0] == row).all(1).nonzero().flatten().tolist()
        assert torch.equal(z, said[0, place])
    assert run.memory.logits.keys() == {0, 1}


def test_derpp_compares_only_the_outputs_that_there_were():
    run = run_of("derpp", memory=MEMORY)
    run.learn([task(0, 0)])
    run.grow_head(0, 4)
    fit = first_fit(run, [task(1, 0)])
    (loss,) = fit.losses
    assert loss.wanted.shape == (1, MEMORY, 4)
    assert torch.equal(loss.compared, torch.tensor([0.5, 0.5, 0, 0]).double().expand(MEMORY, 4))
    run.learn([task(1, 0)])
    assert [run.memory.logits[k].shape[2] for k in range(2)] == [2, 4]


# --- EVCL with replay ------------------------------------------------------------------------------------------------

ROWS, BETA, WARM = 40, 0.25, 2.0


def replayed(alpha, memory, earlier=1, **given):
    """A run of evcl-er that knows the exact posterior of a linear Gaussian model after its earlier tasks; that model's
    first prior and data; and the fit of the next task. Row i of a task is an observation t_i of the weight p_i with
    variance 1.
    """
    options = {"tempering": BETA, "strength": 0.0, "replay_share": alpha, "memory": memory, "one_softmax": True}
    run = run_of("evcl-er", prior_std=0.8, epochs=1, distill_temperature=WARM, **options, **given)
    for k in range(earlier):
        run.learn([numbered(k)])
    size = run.network.layout.size
    draw = generator(0, "observations")
    places = torch.randint(size, (earlier + 1, ROWS), generator=draw)
    seen = 1 + torch.randn(earlier + 1, ROWS, generator=draw, dtype=torch.float64)
    zeros = torch.zeros_like(run.network.posterior.mean)
    first = Gaussian(zeros, torch.full_like(zeros, 0.8).log())
    known = posterior(first, [(places[k], seen[k], 1 / BETA) for k in range(earlier)])
    run.memory = replace(run.memory, inner=replace(run.memory.inner, prior=known))
    return run, first, places, seen, first_fit(run, [numbered(earlier)])


def numbered(k):
    """A task whose inputs say the task and the row."""
    x = torch.zeros(1, ROWS, INPUTS, dtype=torch.float64)
    x[..., 0], x[..., 1] = k, torch.arange(ROWS)
    return TaskData(x, torch.arange(ROWS).unsqueeze(0) % 2, 0, task=k)


def posterior(prior, data):
    """Of the linear Gaussian model. `data`: places, observations and how often each counts."""
    precision = (-2 * prior.log_std).exp()
    mean = precision * prior.mean
    for places, seen, times in data:
        times = torch.as_tensor(times, dtype=mean.dtype).expand(len(seen))
        precision = precision.index_add(1, places, times.unsqueeze(0))
        mean = mean.index_add(1, places, (times * seen).unsqueeze(0))
    return Gaussian(mean / precision, -0.5 * precision.log())


def optimum(fit, places, seen, known):
    """Where the fit's objective is minimal, if the NLL of a row and the KL between its outputs are those of the linear
    Gaussian model: the KL is half the squared distance from what the posterior `known` predicts.
    """
    term, (loss,) = fit.terms[0], fit.losses
    new, *inputs = fit.data
    data = [(places[-1], seen[-1], 0.5 * new.weights[0] / ROWS / term.weight)]  # half of each batch is new
    at, size = ROWS, sum(one.y.shape[1] for one in inputs)
    for one in inputs:
        m = one.y.shape[1]
        k, rows = one.x[0, :, 0].long(), one.x[0, :, 1].long()
        times = 0.5 * loss.strength[0][0, at : at + m] * WARM**2 / size / term.weight
        data.append((places[k, rows], known.mean[0, places[k, rows]], times))
        at += m
    return posterior(term.prior, data)


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("earlier", [1, 3])
def test_if_all_rows_are_kept_every_share_gives_the_exact_posterior(alpha, earlier):
    run, first, places, seen, fit = replayed(alpha, memory=ROWS * earlier, earlier=earlier)
    assert len(fit.data) == 1 + earlier
    exact = posterior(first, [(places[k], seen[k], 1 / BETA) for k in range(earlier + 1)])
    found = optimum(fit, places, seen, run.memory.inner.prior)
    torch.testing.assert_close(found.mean, exact.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.log_std, exact.log_std, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("alpha", [0.1, 0.6, 1.0])
def test_rows_count_once_in_all_for_every_share(alpha):
    run, _, _, _, fit = replayed(alpha, memory=8)
    new, inputs = fit.data
    assert not inputs.weights.any()  # labels of kept rows are not learned again
    assert bool((new.weights == 2).all())
    carried = float(fit.losses[0].strength[0].sum()) * WARM**2 / inputs.y.shape[1] / 2  # in units of the new task
    left, each = remaining(
        run.memory.rehearsal.kept, [ROWS], run.memory.inner.rows, alpha, round_of(run, [numbered(1)])
    )
    assert carried == pytest.approx(alpha)
    assert carried + float(left) == pytest.approx(1)
    assert bool((each[0] == left).all())
    added, before = ((-2 * q.log_std).exp() - 1 / 0.64 for q in (fit.terms[0].prior, run.memory.inner.prior))
    torch.testing.assert_close(added, (1 - alpha) * before)
    assert torch.equal(fit.terms[0].prior.mean, run.memory.inner.prior.mean)


def test_a_task_without_kept_rows_stays_in_the_posterior():
    run = learned("evcl-er", TWO, memory=10, replay_share=0.8)
    kept, seen = run.memory.rehearsal.kept[:1], run.memory.inner.rows
    left, each = remaining(kept, [EXAMPLES], seen, 0.8, round_of(run, [task(2, 0)]))
    assert float(left) == pytest.approx(1 - 0.8 / 2)
    view = run.network.layout.view
    assert float(view(each, "head 0.weight").unique()) == pytest.approx(0.2)
    assert float(view(each, "head 1.weight").unique()) == 1
    assert float(view(each, "1.weight").unique()) == pytest.approx(0.6)


def test_a_kept_row_stands_for_rows_of_its_own_class():
    """Classes are kept in equal numbers, whatever their numbers of rows; each class counts as it was."""
    run = run_of("evcl-er", memory=8)
    first = task(0, 0)
    y = torch.zeros_like(first.y)
    y[:, :6] = 1
    run.learn([replace(first, y=y)])
    (kept,), (rows,) = represented(run.memory.rehearsal, round_of(run, [task(1, 0)]))
    assert rows == EXAMPLES
    for label, count in ((0, EXAMPLES - 6), (1, 6)):
        own = kept.y[0] == label
        assert int(own.sum()) == 4
        assert float(kept.weights[0][own].sum()) * rows / 8 == pytest.approx(count)
    (inputs,) = completed([kept], [rows], round_of(run, [task(1, 0)]))
    assert float(inputs.weights.mean()) == pytest.approx(float(kept.weights.mean()))
    within = (inputs.weights >= kept.weights.min() * 0.5) & (inputs.weights <= kept.weights.max() * 2)
    assert bool(within.all())


def test_inputs_are_kept_rows_and_mixtures_of_two_of_one_task():
    run = learned("evcl-er", TWO, memory=16, replicas=2)
    kept, rows = represented(run.memory.rehearsal, round_of(run, [task(2, 0)]))
    for one, inputs in zip(kept, completed(kept, rows, round_of(run, [task(2, 0)])), strict=True):
        assert inputs.x.shape[:2] == (2, EXAMPLES // 2)  # of both tasks as many as there are new rows
        assert torch.equal(inputs.x[:, :8], one.x)
        for r in range(2):
            for x in inputs.x[r, 8:]:
                gaps = [(torch.lerp(b, a, _along(x, a, b)) - x).abs().max() for a in one.x[r] for b in one.x[r]]
                assert float(min(gaps)) < 1e-9
        assert not torch.equal(inputs.x[0, 8:], inputs.x[1, 8:])
    few = completed(kept, [9, 8], round_of(run, [task(2, 0)]))
    assert [one.y.shape[1] for one in few] == [9, 8]  # a task has no more inputs than rows
    assert few[1] is kept[1]


def _along(x, a, b):
    """u with x = b + u (a - b), within 0 to 1, if x is between a and b."""
    away = (a - b).square().sum()
    return ((x - b) @ (a - b) / away).clamp(0, 1) if away > 0 else torch.zeros_like(away)


def test_tokens_are_not_mixed():
    network = nn.Sequential(skip_init(nn.Embedding, 5, 3), nn.Flatten(), skip_init(nn.Linear, 6, 4), nn.ReLU())
    run, y = run_of("evcl-er", network=network, features=4, heads=[2], memory=6), torch.arange(20).unsqueeze(0) % 2
    first, second = (torch.randint(5, (1, 20, 2), generator=generator(k, "x")).double() for k in range(2))
    run.learn([TaskData(first, y, 0)])
    fit = first_fit(run, [TaskData(second, y, 0, task=1)])
    assert [one.n for one in fit.data] == [20, 6]


def test_inputs_have_the_outputs_of_the_last_posterior_through_their_own_head():
    run = learned("evcl-er", TWO, memory=10, replay_share=0.5, distill_temperature=3.0)
    network = plain(run)
    fit = first_fit(run, [task(2, 0)])
    (loss,), at = fit.losses, EXAMPLES
    assert (list(loss.heads), len(fit.data)) == ([0, 1], 3)
    for one in fit.data[1:]:
        rows = slice(at, at + one.y.shape[1])
        wanted = (logits(network, one.x[0], one.head) / 3).log_softmax(1)
        torch.testing.assert_close(loss.said[one.head][0, rows], wanted.detach())
        assert bool((loss.strength[one.head][0, rows] > 0).all())
        assert not loss.strength[1 - one.head][0, rows].any()
        at = rows.stop
    assert not any(strength[0, :EXAMPLES].any() for strength in loss.strength)
    assert loss.said[0].data_ptr() != run.network.posterior.mean.data_ptr()


def test_a_class_that_is_new_in_a_head_has_probability_0_at_old_inputs():
    run = run_of("evcl-er", memory=10)
    run.learn([task(0, 0)])
    run.grow_head(0, 4)
    (loss,) = first_fit(run, [task(1, 0)]).losses
    p = loss.said[0][0, EXAMPLES:].exp()
    assert p.shape[1] == 4
    assert not p[:, 2:].any()
    torch.testing.assert_close(p.sum(1), torch.ones_like(p[:, 0]))
    run.learn([task(1, 0)])
    assert bool(run.network.posterior.mean.isfinite().all())


def test_the_elastic_term_loses_the_same_share():
    run = run_of("evcl-er", memory=10, replay_share=0.25)
    run.learn([task(0, 0)])
    fit = first_fit(run, [task(1, 1)])
    alone = run_of("evcl-er", memory=10, replay_share=0.0)
    alone.load_tensors(run.tensors(), run.outline(), run.rounds, run.seen)
    whole = first_fit(alone, [task(1, 1)])
    torch.testing.assert_close(fit.terms[1].importance, 0.75 * whole.terms[1].importance)


def test_with_a_share_of_0_it_is_evcl():
    """Kept rows have no weight. They are in the batches, so the noise is another."""
    run, other = run_of("evcl-er", distill=0.0, replay_share=0.0), run_of("evcl", distill=0.0)
    for one in (run, other):
        one.learn([task(0, 0)])
    fit, wanted = first_fit(run, [task(1, 1)]), first_fit(other, [task(1, 1)])
    assert not fit.data[1].weights.any()
    assert not fit.losses[0].strength[0].any()
    assert bool((fit.data[0].weights == 2).all())
    for a, b in zip(fit.terms, wanted.terms, strict=True):
        for x, y in zip(a.springs().mean.__dict__.values(), b.springs().mean.__dict__.values(), strict=True):
            torch.testing.assert_close(x, y)


# --- EVCL with generated rows ----------------------------------------------------------------------------------------


def test_a_method_made_from_evcl_keeps_its_own_learn():
    """With a memory, EVCL becomes evcl-er. A method with another `learn` says that it does not, or is refused."""
    called = []

    def learn(memory, round_, s):
        called.append(round_.number)
        return (yield from METHODS["evcl"].learn(memory, round_, s))

    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    mine = replace(METHODS["evcl"], name="mine", learn=learn)
    with pytest.raises(evcl.EvclError, match=r'mine has a `learn` of its own.*kept_as="rows"'):
        evcl.Learner(evcl.nn.mlp(4, [8]), mine, memory=10)
    learner = evcl.Learner(evcl.nn.mlp(4, [8]), replace(mine, kept_as="rows"), memory=10, epochs=1)
    learner.learn(x, (x[:, 0] > 0).long())
    assert (called, learner.kept) == ([0], 10)
