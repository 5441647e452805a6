"""Replay of kept and of generated rows: DER++, A-GEM, EVCL with either and DGR do what their equations say, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import small_runs
import torch
import torch.nn.functional as F
from small_runs import EXAMPLES, F64, INPUTS, assert_weights, first_fit, learned, logits, plain, round_of, run_of, task
from torch import nn
from torch.nn.utils import skip_init

import evcl
from evcl._core.errors import EvclError
from evcl._core.randomness import generator
from evcl.methods import METHODS, Minibatch, TaskData, packing
from evcl.methods.evcl_er import completed, remaining, represented
from evcl.methods.generator import VAE, begun, generated, made
from evcl.nn import Gaussian, outputs
from evcl.targets import Bound

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
    options |= {"posterior": "diagonal"}
    run = run_of("evcl-er", prior_std=0.8, epochs=1, **{"distill.temperature": WARM}, **options, **given)
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
        times = 0.5 * loss.strength[0][0, at : at + m] / size / term.weight  # T^2 KL has the unit of an NLL
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
    carried = float(fit.losses[0].strength[0].sum()) / inputs.y.shape[1] / 2  # in units of the new task
    left, each = remaining(
        run.memory.rehearsal.kept, [ROWS], run.memory.inner.rows, alpha, round_of(run, [numbered(1)])
    )
    assert carried == pytest.approx(alpha)
    assert carried + float(left) == pytest.approx(1)
    assert bool((each[0] == left).all())
    added, before = ((-2 * q.log_std).exp() - 1 / 0.64 for q in (fit.terms[0].prior, run.memory.inner.prior))
    torch.testing.assert_close(added, (1 - alpha) * before)
    assert torch.equal(fit.terms[0].prior.mean, run.memory.inner.prior.mean)


@pytest.mark.parametrize("warm", [1.0, 2.0, 8.0])
def test_an_old_row_counts_once_at_every_temperature(warm):
    """The curvature of the whole term by the bias of a class is alpha sum_x p (1 - p), p = softmax(z / T)."""
    run = learned("evcl-er", [task(0, 0)], memory=EXAMPLES, replay_share=1.0, **{"distill.temperature": warm})
    fit = first_fit(run, [task(1, 0)])
    (loss,), x, network = fit.losses, fit.data[1].x, run.network
    mean, step = network.posterior.mean.clone(), 1e-3
    p = (outputs(network, mean, network.layout, x, [0]) / warm).softmax(2)[0, :, 0]
    network.layout.view(mean, "head 0.bias")[0, 0] += step
    network.bind(mean, None, network.layout)
    moved = float(loss(network, Minibatch(x, x, EXAMPLES + torch.arange(EXAMPLES).unsqueeze(0))).detach())
    assert EXAMPLES * moved / 2 == pytest.approx(0.5 * step**2 * float((p * (1 - p)).sum()), rel=1e-2)  # half a batch


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
    run = learned("evcl-er", TWO, memory=10, replay_share=0.5, **{"distill.temperature": 3.0})
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
    run = run_of("evcl-er", memory=10, replay_share=0.25, posterior="diagonal")
    run.learn([task(0, 0)])
    fit = first_fit(run, [task(1, 1)])
    alone = run_of("evcl-er", memory=10, replay_share=0.0, posterior="diagonal")
    alone.load_tensors(run.tensors(), run.outline(), run.rounds, run.seen)
    whole = first_fit(alone, [task(1, 1)])
    torch.testing.assert_close(fit.terms[1].importance, 0.75 * whole.terms[1].importance)


def test_with_a_share_of_0_it_is_evcl():
    """Kept rows have no weight. They are in the batches, so the noise is another."""
    plain = {"distill": 0.0, "posterior": "diagonal"}
    run, other = run_of("evcl-er", replay_share=0.0, **plain), run_of("evcl", **plain)
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


# --- deep generative replay: its losses, what it generates, and what stays as it is during a round -------------------


def data(k, head=None, n=40, pixels=False, classes=2):
    source = torch.Generator().manual_seed(k)
    x = torch.randn(1, n, 6, generator=source, dtype=F64)
    y = (x[:, :, k % 6] > 0).long()
    return TaskData(x.sigmoid() if pixels else x, y % classes, k if head is None else head, task=k)


GENERATOR = {"epochs": 3, "batch_size": 10, "generator_width": 12, "latents": 3}


def generating(method="dgr", **given):
    return small_runs.run_of(
        method, **{"network": evcl.nn.mlp(6, [7]), "heads": (2, 2, 2), "usual": GENERATOR, **given}
    )


def plain_vae(weights, gaussian):
    """Replica 0's generator in plain torch."""
    inputs, width = weights["encoder.0.weight"].shape[2], weights["encoder.0.weight"].shape[1]
    vae = VAE(inputs, width, weights["decoder.0.weight"].shape[2], gaussian).to(F64)
    vae.load_state_dict({name: w[0].clone() for name, w in weights.items()})
    return vae


# --- the generator ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gaussian", [False, True])
def test_the_bound_is_that_of_torch_distributions(gaussian):
    source = torch.Generator().manual_seed(0)
    shapes = ((5, 4), (5, 4), (5, 6), (1, 4))
    x, shown, code, spread = (torch.randn(*shape, generator=source, dtype=F64) for shape in shapes)
    x = x.sigmoid()
    outputs = torch.cat([shown, *([spread.expand(5, -1)] if gaussian else []), code], 1)
    mu, log_variance = code.chunk(2, 1)
    normal = torch.distributions.Normal
    kl = torch.distributions.kl_divergence(normal(mu, (log_variance / 2).exp()), normal(0.0, 1.0)).sum(1)
    if gaussian:
        nll = -normal(shown, (spread / 2).exp()).log_prob(x).sum(1)
    else:
        nll = F.binary_cross_entropy(shown.sigmoid(), x, reduction="none").sum(1)
    torch.testing.assert_close(Bound(gaussian).nll(outputs, x), kl + nll)


@pytest.mark.parametrize("pixels", [True, False])
def test_it_generates_what_a_plain_decoder_does(pixels):
    run = generating()
    run.learn([data(0, pixels=pixels)])
    next_round = round_of(run, [data(1, pixels=pixels)])
    x = begun(run.memory, next_round, run.settings).x
    assert x.shape == (1, 40, 6)
    vae, kept = plain_vae(run.memory.weights, not pixels), run.memory.inputs
    (source,) = next_round.generators("generated")
    with torch.no_grad():
        wanted = vae.decoder(torch.randn(40, 3, generator=source).to(F64))
        if pixels:
            wanted = wanted.sigmoid()
        else:
            eps = torch.randn(40, 6, generator=source).to(F64)
            wanted = kept["shift"][0] + kept["scale"][0] * (wanted + (vae.log_variance / 2).exp() * eps)
    low, high = data(0, pixels=pixels).x[0].aminmax(dim=0)
    torch.testing.assert_close(x[0], wanted.clamp(low, high))


@pytest.mark.full
def test_generated_rows_come_to_resemble_the_data():
    """Two clusters: nearly all generated rows are near one of them, and both are visited."""
    source = torch.Generator().manual_seed(0)
    y = torch.randint(2, (1, 400), generator=source)
    x = (y.unsqueeze(2) * 0.7 + 0.15 + 0.03 * torch.randn(1, 400, 6, generator=source)).clamp(0, 1).to(F64)
    run = generating(epochs=40, generator_width=40, generator_lr=5e-3)
    run.learn([TaskData(x, y, 0)])
    made_up = begun(run.memory, round_of(run, [TaskData(x, y, 0, task=1)]), run.settings).x[0]
    ones = (made_up > 0.5).double().mean(1)
    assert float(((ones == 0) | (ones == 1)).double().mean()) > 0.9
    assert 0.25 < float(ones.mean()) < 0.75


# --- the classifier's loss -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [2.0, 0.0])
def test_its_loss_is_that_of_the_definition(temperature):
    """Several heads: each labels all generated rows; their losses are averaged by the rows they had."""
    run = generating(label_temperature=temperature)
    run.learn([data(0, n=30)])
    run.learn([data(1, n=60)])
    new = data(2, n=50)
    fit = first_fit(run, [new])
    (loss,) = fit.losses
    x = begun(run.memory, round_of(run, [new]), run.settings).x[0]
    before, now = plain(run), plain(run)
    source = torch.Generator().manual_seed(0)
    moved = run.network.posterior.mean + 0.1 * torch.randn(run.network.layout.size, generator=source, dtype=F64)
    now.load_state_dict(small_runs.named(run, moved))
    wanted, t = 0.0, temperature or 1.0
    for k, share in ((0, 30 / 90), (1, 60 / 90)):
        z = logits(before, x, k).detach()
        label = (z / t).softmax(1) if temperature else F.one_hot(z.argmax(1), 2).to(F64)
        kl = F.kl_div((logits(now, x, k).detach() / t).log_softmax(1), label, reduction="none").sum(1).mean()
        wanted = wanted + 90 / 50 * share * t**2 * kl
    rows = torch.arange(50).unsqueeze(0)
    run.network.bind(moved, None, run.network.layout)
    run.network.weights.noise = None
    with torch.no_grad():
        found = loss(run.network, Minibatch(new.x, new.y, rows))
    torch.testing.assert_close(found, wanted.reshape(1))


def test_classes_that_a_head_has_not_seen_are_in_no_label():
    run = generating(heads=(3,))
    run.learn([data(0, head=0)])
    run.grow_head(0, 5)
    (loss,) = first_fit(run, [data(1, head=0)]).losses
    assert loss.rows.y.shape == (1, 40, 5)
    assert float(loss.rows.y[..., 2:].max()) == 0
    torch.testing.assert_close(loss.rows.y.sum(2), torch.ones(1, 40, dtype=F64))
    run.learn([data(1, head=0)])
    assert run.memory.rows[0].sum() == 80
    assert run.memory.rows[0].shape == (1, 5)


# --- what stays ------------------------------------------------------------------------------------------------------


def test_generated_rows_are_a_function_of_seed_and_round():
    run = generating(seeds=(0, 1))
    run.learn([data(0)])
    round_ = round_of(run, [data(1)])
    first, again = (begun(run.memory, round_, run.settings).x for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first[0], first[1])
    later = begun(run.memory, replace(round_, number=5), run.settings).x
    assert not torch.equal(first, later)


# --- evcl-dgr --------------------------------------------------------------------------------------------------------


def test_the_past_counts_once():
    """alpha of it in the loss; 1 - alpha in the precision that the prior has beyond the first, and in the elastic
    term.
    """
    found = {}
    for alpha in (0.0, 0.25, 1.0):
        run = generating("evcl-dgr", replay_share=alpha, distill=0.0, tempering=0.1)
        run.learn([data(0)])
        fit = first_fit(run, [data(1, n=80)])
        kl, elastic = fit.terms
        (loss,) = fit.losses
        precision = (-2 * kl.prior.log_std).exp()
        found[alpha] = precision, elastic.importance, float(loss.strength)
        own = run.network.posterior
        natural = (1 - alpha) * (-2 * own.log_std).exp() * own.mean  # the first prior's means are 0
        torch.testing.assert_close(precision * kl.prior.mean, natural, rtol=1e-4, atol=1e-4)
        assert float(loss.strength) == pytest.approx(alpha * 40 / 80)
    first = found[1.0][0]
    added = (found[0.0][0] - first).clamp_min(0)
    assert float(added.max()) > 0.1 * float(first.min())
    torch.testing.assert_close(found[0.25][0], first + 0.75 * added)
    torch.testing.assert_close(found[0.25][1], 0.75 * found[0.0][1])
    assert float(found[1.0][1].abs().max()) == 0


# --- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dgr", "evcl-dgr"])
def test_token_indices_are_refused(method):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(9, 4, _weight=torch.zeros(9, 4))

        def forward(self, x):
            return self.embedding(x).mean(1)

    learner = evcl.Learner(Tokens(), method, epochs=1)
    with pytest.raises(EvclError, match="token indices"):
        learner.learn((torch.arange(60) % 9).view(20, 3).float(), torch.arange(20) % 2, task="a")


def test_inputs_of_another_shape_or_range_are_refused():
    run = generating()
    run.learn([data(0, pixels=True)])
    before = packing.tensors(run.memory)
    with pytest.raises(EvclError, match="within 0 to 1"):
        run.learn([data(1)])
    wider = TaskData(data(1, n=20, pixels=True).x.unflatten(2, (3, 2)), torch.zeros(1, 20, dtype=torch.long), 1, task=1)
    with pytest.raises(EvclError, match=r"\(3, 2\) and \(6,\)"):
        run.learn([wider])
    assert all(torch.equal(before[name], t) for name, t in packing.tensors(run.memory).items())


def test_images_and_convolutions():
    trunk = nn.Sequential(
        skip_init(nn.Conv2d, 1, 3, 3), nn.ReLU(), nn.Flatten(), skip_init(nn.Linear, 108, 8), nn.ReLU()
    )
    source = torch.Generator().manual_seed(0)
    for parameter in trunk.parameters():
        parameter.data.normal_(std=0.1, generator=source)
    learner = evcl.Learner(trunk, "dgr", epochs=2, generator_width=20)
    x = torch.rand(40, 1, 8, 8, generator=source)
    for k in range(2):
        learner.learn(x, (x.flatten(1)[:, k] > 0.5).long(), task=f"task {k}")
    assert learner.state.run.memory.inputs["shape"].tolist() == [[1, 8, 8]]


def test_made_refuses_another_size():
    run = generating()
    run.learn([data(0)])
    round_ = round_of(run, [data(1)])
    replay = begun(run.memory, round_, run.settings)
    other = type(run.settings)({**run.settings, "latents": 5})
    with pytest.raises(EvclError, match="cannot change"):
        made(run.memory, replay.inputs, round_, other)
    assert generated(replay.model, replay.inputs, round_).shape == (1, 40, 6)
