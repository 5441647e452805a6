"""Deep generative replay: its losses by definition, what it generates, and what stays as it is during a round."""

from __future__ import annotations

from dataclasses import replace

import pytest
import small_runs
import torch
import torch.nn.functional as F
from small_runs import F64, first_fit, logits, named, plain, round_of
from torch import nn
from torch.nn.utils import skip_init

import evcl
from evcl._core.errors import EvclError
from evcl.methods import Minibatch, TaskData, packing
from evcl.methods.generator import VAE, begun, generated, made
from evcl.targets import Bound


def data(k, head=None, n=40, pixels=False, classes=2):
    source = torch.Generator().manual_seed(k)
    x = torch.randn(1, n, 6, generator=source, dtype=F64)
    y = (x[:, :, k % 6] > 0).long()
    return TaskData(x.sigmoid() if pixels else x, y % classes, k if head is None else head, task=k)


USUAL = {"epochs": 3, "batch_size": 10, "generator_width": 12, "latents": 3}


def run_of(method="dgr", **given):
    return small_runs.run_of(method, **{"network": evcl.nn.mlp(6, [7]), "heads": (2, 2, 2), "usual": USUAL, **given})


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
    run = run_of()
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
    run = run_of(epochs=40, generator_width=40, generator_lr=5e-3)
    run.learn([TaskData(x, y, 0)])
    made_up = begun(run.memory, round_of(run, [TaskData(x, y, 0, task=1)]), run.settings).x[0]
    ones = (made_up > 0.5).double().mean(1)
    assert float(((ones == 0) | (ones == 1)).double().mean()) > 0.9
    assert 0.25 < float(ones.mean()) < 0.75


# --- the classifier's loss -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [2.0, 0.0])
def test_its_loss_is_that_of_the_definition(temperature):
    """Several heads: each labels all generated rows; their losses are averaged by the rows they had."""
    run = run_of(label_temperature=temperature)
    run.learn([data(0, n=30)])
    run.learn([data(1, n=60)])
    new = data(2, n=50)
    fit = first_fit(run, [new])
    (loss,) = fit.losses
    x = begun(run.memory, round_of(run, [new]), run.settings).x[0]
    before, now = plain(run), plain(run)
    source = torch.Generator().manual_seed(0)
    moved = run.network.posterior.mean + 0.1 * torch.randn(run.network.layout.size, generator=source, dtype=F64)
    now.load_state_dict(named(run, moved))
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
    run = run_of(heads=(3,))
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
    run = run_of(seeds=(0, 1))
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
        run = run_of("evcl-dgr", replay_share=alpha, distill=0.0, tempering=0.1)
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
    run = run_of()
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
    assert learner.parts.run.memory.inputs["shape"].tolist() == [[1, 8, 8]]


def test_made_refuses_another_size():
    run = run_of()
    run.learn([data(0)])
    round_ = round_of(run, [data(1)])
    replay = begun(run.memory, round_, run.settings)
    other = type(run.settings)({**run.settings, "latents": 5})
    with pytest.raises(EvclError, match="cannot change"):
        made(run.memory, replay.inputs, round_, other)
    assert generated(replay.model, replay.inputs, round_).shape == (1, 40, 6)
