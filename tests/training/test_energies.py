"""Models without labels: private layers, the bound of a VAE, its Fisher, its likelihood, and streams of characters."""

from __future__ import annotations

import base64
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from checks import quietly, refused
from interrupted import assert_stopped_run_ends_the_same
from torch import nn

import evcl
from evcl import curvature
from evcl._core.catalogue import METHOD_SUMMARIES
from evcl.benchmarks import get
from evcl.experiments import configure, execute
from evcl.nn import VAE, PerTask, bayesianize, task_vae
from evcl.nn.per_task import Mixture
from evcl.targets import Bound, Energy, NextToken
from evcl.training.per_task import TaskFit

F64 = torch.float64


def drawn(density, n):
    return quietly(lambda: density.sample((n,)))


def linear(ins, outs, **options):
    return quietly(lambda: nn.Linear(ins, outs, **options))


ROWS, LATENTS, PIXELS = 5, 2, 6


class Fixed:
    """Noise that is always the same, so that a test can use it too."""

    def __init__(self, eps):
        self.eps = eps

    def normal_(self, out):
        return out.copy_(self.eps)


@pytest.fixture
def made():
    """Two replicas of a small VAE with two tasks' private weights, in float64; and inputs, eps and plain copies."""
    source = torch.Generator().manual_seed(3)
    sources = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    network = bayesianize(task_vae(PIXELS, 4, LATENTS, 1), init_std=None, generators=sources, dtype=F64)
    network.add_task_weights(2, lambda task: [torch.Generator().manual_seed(10 * task + r) for r in range(2)])
    x = torch.rand(2, ROWS, PIXELS, generator=source, dtype=F64)
    eps = torch.randn(2, ROWS, LATENTS, generator=source, dtype=F64)
    return network, x, eps


def plain(network, r, task):
    """The plain VAE with the weights of replica r and the private weights of a task."""
    found = task_vae(PIXELS, 4, LATENTS, 1).double()
    views = network.layout.views(network.posterior.mean)
    private = [m for m in found.modules() if isinstance(m, PerTask)]
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if name in views:
                parameter.copy_(views[name][r])
        for layer, module in zip(network.task_weights.kind.parts, private, strict=True):
            own = layer.inner.layout.views(network.task_weights.table[:, task, layer.span])
            for name, parameter in module.module.named_parameters():
                parameter.copy_(own[name][r])
    return found


def bound_of(vae, x, eps):
    """The bound of each row of x [n, D], in the plainest form."""
    mu, log_variance = vae.encoder(x).chunk(2, 1)
    sigma = (log_variance / 2).exp()
    q = torch.distributions.Normal(mu, sigma)
    kl = torch.distributions.kl_divergence(q, torch.distributions.Normal(torch.zeros_like(mu), 1.0)).sum(1)
    p = torch.distributions.Bernoulli(logits=vae.decoder(mu + sigma * eps), validate_args=False)
    return kl - p.log_prob(x).sum(1)


@pytest.mark.parametrize("task", [0, 1])
def test_gradients_of_the_bound_are_those_of_autograd(made, task):
    network, x, eps = made
    fit = TaskFit(network, [task], 1.0)
    grads = torch.zeros_like(network.posterior.mean)
    network.bind(network.posterior.mean, None, network.layout, (grads, None), fit.rows)
    network.weights.noise = Fixed(eps)
    with network.using(task):
        nll = Bound().nll(network(x.flatten(0, 1)), x.flatten(0, 1))
    nll.sum().backward()
    network.collect_gradients()
    fit.rows.collect()
    for r in range(2):
        vae = plain(network, r, task)
        wanted = bound_of(vae, x[r], eps[r])
        torch.testing.assert_close(nll.view(2, -1)[r], wanted)
        wanted.sum().backward()
        found = dict(vae.named_parameters())
        shared = torch.cat([found[name].grad.flatten() for name in network.layout.shapes])
        torch.testing.assert_close(grads[r], shared)
        own = [m for m in vae.modules() if isinstance(m, PerTask)]
        private = torch.cat([p.grad.flatten() for m in own for p in m.parameters()])
        torch.testing.assert_close(fit.grads[r, 0], private)


def test_the_fisher_of_the_bound_is_the_mean_square_of_each_examples_gradient(made):
    network, x, eps = made
    mean, y = network.posterior.mean, x
    network.whole = PIXELS + 2 * LATENTS
    about = curvature.Sample(network, mean, network.layout, [0], x, y, task=1, noise=Fixed(eps))
    found = curvature.fisher(about, likelihood=Bound())
    for r in range(2):
        vae, total = plain(network, r, 1), 0.0
        names = [name for name, _ in vae.named_parameters() if name in network.layout.shapes]
        for b in range(ROWS):
            vae.zero_grad()
            bound_of(vae, x[r, b : b + 1], eps[r, b : b + 1]).sum().backward()
            total = total + torch.cat([vae.get_parameter(name).grad.flatten() for name in names]).square()
        torch.testing.assert_close(found[r], total / ROWS)


def test_every_example_of_a_mixed_batch_uses_the_weights_of_its_own_task(made):
    network, x, _ = made
    network.bind(network.posterior.mean, None, network.layout)
    places = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 0, 0]])
    with network.using(Mixture([0, 1], places)):
        mixed = network(x.flatten(0, 1)).view(2, ROWS, -1)
    for task in (0, 1):
        with network.using(task):
            alone = network(x.flatten(0, 1)).view(2, ROWS, -1)
        torch.testing.assert_close(mixed[places == task], alone[places == task])
    assert not torch.equal(network.task_weights.table[:, 0], network.task_weights.table[:, 1])  # drawn anew
    assert len(network.task_weights) == 2


def test_private_layers_are_trained_by_their_own_task_alone():
    stream = get("characters-digits", tasks=2)
    learner = evcl.Learner(task_vae(64, 16, 2, 1), "naive", likelihood="bound")
    learner.learn(stream[0], epochs=1)
    before = deepcopy(learner.state.run.network.task_weights.table)
    shared = learner.state.run.network.posterior.mean.clone()
    learner.learn(stream[1], epochs=1)
    assert torch.equal(learner.state.run.network.task_weights.table[:, :1], before)
    assert not torch.equal(learner.state.run.network.posterior.mean, shared)


# --- the likelihood ---------------------------------------------------------------------------------------------------


def linear_gaussian(latents, exact):
    """A linear decoder with Gaussian noise, p(x) = N(b, W W' + diag v), and an encoder: exact or not."""
    source = torch.Generator().manual_seed(1)
    w, b = (torch.randn(*shape, generator=source, dtype=F64) for shape in ((3, latents), (3,)))
    log_v = torch.tensor([-0.5, 0.2, 0.1], dtype=F64)
    decoder, encoder = linear(latents, 6, dtype=F64), linear(3, 2 * latents, dtype=F64)
    precision = torch.eye(latents, dtype=F64) + w.T @ (w / log_v.exp().unsqueeze(1))
    with torch.no_grad():
        decoder.weight.copy_(torch.cat([w, torch.zeros_like(w)]))
        decoder.bias.copy_(torch.cat([b, log_v]))
        gain = torch.linalg.inv(precision) @ w.T / log_v.exp()  # [L, 3]
        spread = -precision.diagonal().log() if exact else torch.zeros(latents, dtype=F64)
        encoder.weight.copy_(torch.cat([gain, torch.zeros_like(gain)]))
        encoder.bias.copy_(torch.cat([-gain @ b, spread]))
    covariance = w @ w.T + log_v.exp().diag()
    return VAE(encoder, decoder, latents), torch.distributions.MultivariateNormal(b, covariance)


@pytest.mark.parametrize(("latents", "exact", "draws", "error"), [(1, True, 3, 1e-6), (2, False, 20_000, 0.02)])
def test_log_likelihood_is_the_exact_one_of_a_linear_gaussian_model(latents, exact, draws, error):
    network, density = linear_gaussian(latents, exact)
    learner = evcl.Learner(network, "naive", likelihood="gaussian-bound", init="network", lr=1e-12)
    x = drawn(density, 8)
    learner.learn(x, epochs=1)
    found = learner.log_likelihood(x, draws=draws)
    torch.testing.assert_close(found, density.log_prob(x), rtol=0, atol=error)


def test_samples_have_the_moments_of_a_linear_gaussian_model():
    network, density = linear_gaussian(1, True)
    learner = evcl.Learner(network, "naive", likelihood="gaussian-bound", init="network", lr=1e-12)
    learner.learn(drawn(density, 8), epochs=1)
    found = learner.sample(0, 20_000)
    torch.testing.assert_close(found.mean(0), density.mean, rtol=0, atol=0.05)
    w = network.decoder.weight[:3].detach()
    torch.testing.assert_close(found.T.cov(), w @ w.T, rtol=0.05, atol=0.05)  # the means of p(x | z), without noise
    assert torch.equal(learner.sample(0, 20_000), found)


# --- learners and streams ---------------------------------------------------------------------------------------------


def test_a_generative_learner_is_saved_and_goes_on(tmp_path):
    stream = get("characters-digits", tasks=2)
    learner = evcl.Learner(task_vae(64, 16, 2, 1), "evcl", likelihood="bound", seed=2)
    learner.learn(stream[0], epochs=2)
    learner.learn(stream[1].train.x.numpy(), epochs=2, task="one")
    learner.save(tmp_path / "model.safetensors")
    again = evcl.load(tmp_path / "model.safetensors", network=task_vae(64, 16, 2, 1))
    x = stream[0].test.x[:4]
    assert torch.equal(again.log_likelihood(x, "0"), learner.log_likelihood(x, "0"))
    for one in (learner, again):
        one.learn(stream[1], epochs=1)
    assert torch.equal(again.sample("1", 3), learner.sample("1", 3))
    assert learner.sample("one", 3).shape == (3, 1, 8, 8)
    mean = learner.mean_network("one")(x)
    torch.testing.assert_close(mean[:, :64].sigmoid().shape, torch.Size([4, 64]))
    code = learner.state.run.network  # the plain network and the replicas compute the same
    code.bind(code.posterior.mean, None, code.layout)
    code.weights.noise = None
    with code.using(1):
        torch.testing.assert_close(code(x), mean)


def generative(method="evcl", **options):
    return evcl.Learner(task_vae(4, 4, 1, 1), method, likelihood="bound", **options)


def test_what_a_generative_learner_cannot_do_is_said_in_one_line():
    learner, x = generative(), torch.rand(8, 4, generator=torch.Generator().manual_seed(0))
    with refused("within 0 to 1, not -1 to 1"):
        learner.learn(torch.tensor([[-1.0, 1.0, 0.0, 0.0]]))
    with refused("a bound explains its inputs: call learn(x)"):
        learner.learn(x, torch.zeros(8, dtype=torch.long))
    for _ in range(2):
        learner.learn(x, epochs=1)
    norm = nn.Sequential(PerTask(nn.BatchNorm1d(4)))
    for words, wrong in (
        ("no labels to predict", lambda: learner.predict(x, 0)),
        ("no labels to predict", lambda: learner.predict_proba(x, 0)),
        ("no labels to predict", lambda: learner.predictions(x, 0)),
        ("no labels to predict", lambda: learner.measure((x, x), 0)),
        ("choose a task", lambda: learner.sample(n=2)),
        ("predicts labels", lambda: evcl.Learner(evcl.nn.mlp(4, [4])).sample(0)),
        ("learns classes only", lambda: generative("lwf")),
        ("learns classes only", lambda: generative("evcl-er")),
        ("leave memory out", lambda: learner.keep(10)),
        ("leave memory out for bound targets", lambda: generative(memory=10)),
        ("leave memory out for bound targets", lambda: generative("naive", memory=10)),
        ("film", lambda: generative(film=True)),
        ("without running statistics", lambda: evcl.Learner(norm, "naive", likelihood=Energy(lambda o, y: o.sum(1)))),
    ):
        with refused(words):
            wrong()


@pytest.mark.parametrize(
    ("network", "likelihood", "words"),
    [
        (VAE(linear(4, 2), linear(1, 8), 1), "bound", "must give 2 numbers and the decoder 4, not 2 and 8"),
        (VAE(linear(4, 2), linear(1, 4), 1), "gaussian-bound", "must give 2 numbers and the decoder 8, not 2 and 4"),
        (VAE(linear(4, 6), linear(3, 4), 2), "bound", "must give 4 numbers and the decoder 4, not 6 and 4"),
        (linear(4, 6), "bound", "only a network that is an evcl.nn.VAE"),
    ],
)
def test_a_network_that_does_not_fit_a_bound_is_refused(network, likelihood, words):
    with refused(words):
        evcl.Learner(network, "evcl", likelihood=likelihood).learn(torch.full((8, 4), 0.5), epochs=1)


def settings(**more):
    return {"epochs": 20, "batch_size": 32, **more}


@pytest.mark.full
def test_evcl_forgets_characters_less_than_naive_training():
    """The stream of digits, through the commands' own path: seeds side by side, samples and a classifier's doubt."""
    found = {}
    for method, more in {"naive": {}, "evcl": {"strength": 30.0}}.items():
        config = configure("characters-digits", method, "default", (0, 1), 2, settings(**more))
        found[method] = execute(config)
    ours, naive = found["evcl"], found["naive"]
    assert ours.accuracy is None
    assert ours.score == "log_likelihood"
    assert ours.log_likelihood.mean > naive.log_likelihood.mean + 1
    assert ours.forgetting.mean < naive.forgetting.mean / 2
    assert ours.sample_uncertainty.mean < naive.sample_uncertainty.mean
    assert base64.b64decode(ours.samples).startswith(b"\x89PNG")


def test_seeds_side_by_side_are_as_each_alone():
    both, alone = (
        execute(configure("characters-digits", "evcl", "default", seeds, 2, settings(epochs=1)))
        for seeds in ((0, 1), (1,))
    )
    found, wanted = (torch.tensor(one.log_likelihoods[i][-1]) for one, i in ((both, 1), (alone, 0)))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)
    assert both.sample_uncertainty.per_seed[1] == pytest.approx(alone.sample_uncertainty.per_seed[0], rel=1e-3)


def test_a_stream_that_is_stopped_ends_the_same(tmp_path):
    config = configure("characters-digits", "evcl", "default", (0, 1), 2, settings(epochs=2, batch_size=64))
    assert_stopped_run_ends_the_same(config, tmp_path)


def test_joint_training_learns_all_characters_at_once():
    found = execute(configure("characters-digits", "joint", "default", (0,), 2, settings(epochs=3)))
    assert found.log_likelihoods[0][0] == [None, None]
    assert min(found.log_likelihoods[0][1]) > -45


# --- energies ---------------------------------------------------------------------------------------------------------


def test_an_energy_of_ones_own_is_what_is_minimised(tmp_path):
    """Squared errors of a network without heads: the same weights as torch finds, and energies as they are defined."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, generator=source)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]])
    energy = Energy(lambda outputs, y: 0.5 * (outputs - y).square().sum(1))
    learner = evcl.Learner(linear(3, 1), "naive", likelihood=energy, lr=0.05)
    learner.learn(x, y, epochs=200)
    network = learner.mean_network(0)
    torch.testing.assert_close(network(x), y, rtol=0, atol=0.1)
    wanted = -0.5 * (network(x) - y).square().sum(1)
    torch.testing.assert_close(learner.log_likelihood((x, y)), wanted.detach())
    learner.save(tmp_path / "model.safetensors")
    with pytest.raises(evcl.EvclError, match="its likelihood is your own"):
        evcl.load(tmp_path / "model.safetensors", network=linear(3, 1))
    again = evcl.load(tmp_path / "model.safetensors", network=linear(3, 1), likelihood=energy)
    assert torch.equal(again.log_likelihood((x, y)), learner.log_likelihood((x, y)))
    wrong = evcl.Learner(linear(3, 1), "naive", likelihood=Energy(lambda outputs, y: outputs.mean()))
    with pytest.raises(evcl.EvclError, match=r"one number per example, \[32\], not \(\)"):
        wrong.learn(x[:32], epochs=1)
    for given in ((3,), ()):
        with refused("Energy takes a function"):
            Energy(*given)


def test_the_energy_of_a_language_model_is_the_sum_of_its_surprises():
    source = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, generator=source, dtype=F64)  # for T - 1 = 3 positions of 5 tokens
    x = torch.tensor([[0, 1, 2, 3], [4, 4, 0, 1]])
    wanted = [sum(float(F.cross_entropy(logits[m, t], x[m, t + 1])) for t in range(3)) for m in range(2)]
    torch.testing.assert_close(NextToken().nll(logits.flatten(1), x), torch.tensor(wanted, dtype=F64))
    for message, z, tokens in (
        ("logits for 3 positions", logits.flatten(1)[:, :7], x),
        ("all but the last, not 20 numbers", torch.zeros(2, 4 * 5), x),
        ("at least 2 tokens", logits.flatten(1), x[:, :1]),
    ):
        with refused(message):
            NextToken().nll(z, tokens)


def test_a_vocabulary_tells_logits_of_all_positions_from_those_of_a_larger_vocabulary():
    """[M, T x V] has as many numbers as [M, (T - 1) x W] for some W, if T - 1 divides V."""
    source = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 8, generator=source, dtype=F64)  # T - 1 = 3 positions of 8 tokens, or T = 4 of 6
    x = torch.tensor([[0, 1, 2, 3], [4, 4, 0, 1]])
    with pytest.raises(evcl.EvclError, match="logits of 6 tokens for 3 positions, all but the last, not 24 numbers"):
        NextToken(vocabulary=6).nll(logits.flatten(1), x)
    wanted = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="none").view(2, 3).sum(1)
    for likelihood in (NextToken(), NextToken(vocabulary=8)):
        torch.testing.assert_close(likelihood.nll(logits.flatten(1), x), wanted)


def test_replay_without_classes_keeps_equally_many_rows_of_each_task():
    learner = evcl.Learner(linear(3, 2), "er", likelihood=Energy(lambda o, y: o.square().sum(1)), memory=10)
    for _ in range(2):
        learner.learn(torch.ones(30, 3), epochs=1)
    assert [task.y.shape[1] for task in learner.state.run.kept_examples()] == [5, 5]
    wanted = float(learner.log_likelihood(torch.ones(1, 3)))
    assert learner.evaluate() == {"0": pytest.approx(wanted), "1": pytest.approx(wanted)}  # the mean log-likelihood
    assert learner.card()["tasks"][0]["now"] == pytest.approx(wanted)


REFUSALS = "learns classes only", "film scales the units", "progressive trains every layer", "has no heads"
REFUSALS += ("updates all weights by a filter",)


@pytest.mark.full
@pytest.mark.parametrize("method", sorted({*METHOD_SUMMARIES} - {"joint"}))  # it takes whole tasks
def test_every_method_learns_without_labels_or_says_why_not(method):
    x = torch.rand(12, 4, generator=torch.Generator().manual_seed(0))
    try:
        learner = generative(method, epochs=1)
        learner.learn(x)
    except evcl.EvclError as refusal:
        assert any(words in str(refusal) for words in REFUSALS), refusal  # noqa: PT017
        return
    learner.learn(x)
    assert torch.isfinite(torch.as_tensor(learner.log_likelihood(x, 0))).all()
