"""Parameters that a network's own code uses, norms of weights, recurrent layers: what a naive form does not show."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from models import Net, saved
from torch import nn
from torch.nn.utils import parametrizations

import evcl
from evcl._core.randomness import GeneratorNoise
from evcl.nn import bayesianize

pytestmark = pytest.mark.usefixtures("torch_draws")


def bound(network, noise=None):
    """Trained without variances, so that the noise is that of dropout alone."""
    network.begin()
    network.bind(network.posterior.mean, None, network.layout)
    network.weights.noise = noise
    return network


def sources(count):
    return GeneratorNoise([torch.Generator().manual_seed(r) for r in range(count)])


def old(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.spectral_norm(layer)


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, old], ids=["parametrised", "by a hook"])
@pytest.mark.parametrize("layer", [nn.Linear(6, 4), nn.Conv2d(2, 4, 3)], ids=["linear", "convolution"])
def test_the_vectors_of_a_spectral_norm_follow_the_weights_in_training_alone(norm, layer, generator):
    plain = norm(copy.deepcopy(layer))
    x = torch.randn(3, 5, *((6,) if isinstance(layer, nn.Linear) else (2, 3, 3)), generator=generator)
    network = bayesianize(nn.Sequential(plain, nn.Flatten()), replicas=3)
    own = [copy.deepcopy(plain).train() for _ in range(3)]
    for step in range(4):
        network.posterior.mean += 0.3 * torch.randn(network.posterior.mean.shape, generator=generator)
        for r, one in enumerate(own):
            for name, p in one.named_parameters():
                p.data.copy_(network.layout.view(network.posterior.mean, f"0.{name}")[r])
        bound(network, sources(3) if step < 3 else None)
        if step == 3:
            kept = {name: t.clone() for name, t in network.statistics().items()}
            own = [one.eval() for one in own]
        found = network(x.flatten(0, 1))
        wanted = torch.cat([one(part).flatten(1) for one, part in zip(own, x, strict=True)])
        torch.testing.assert_close(found, wanted)
    assert len(kept) == 2
    for name, tensor in network.statistics().items():
        assert torch.equal(tensor, kept[name])  # in evaluation
        mine = torch.stack([dict(one.named_buffers())[name.removeprefix("0.")] for one in own])
        torch.testing.assert_close(tensor, mine)
        assert not torch.equal(tensor[0], tensor[1])  # one per replica


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, old], ids=["parametrised", "by a hook"])
def test_a_network_with_a_spectral_norm_is_saved_and_becomes_plain(norm, generator, tmp_path):
    def make():
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return nn.Sequential(norm(nn.Linear(4, 8)), nn.Tanh())

    x, y = torch.randn(40, 4, generator=generator), torch.arange(40) % 2
    learner = evcl.EVCL(make(), epochs=10, lr=0.05)
    learner.learn((x + y.unsqueeze(1), y))
    p = learner.predict_proba(x)
    assert torch.equal(learner.predict_proba(x), p)
    again = saved(learner, tmp_path, x, make())
    plain = again.mean_network()
    at_mean = learner.parts.run.predict(x[None], 0, [learner.parts.run.network.posterior.mean])[0]
    torch.testing.assert_close(plain(x).softmax(1), at_mean)
    largest = torch.linalg.matrix_norm(plain[0][0].weight, 2)
    assert abs(float(largest.detach()) - 1) < 0.05


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_layers_is_the_runs_noise(make, generator):
    x = torch.randn(2 * 6, 3, 4, generator=generator)
    reads = Net(lambda m, x: m.layer(x.transpose(0, 1))[0][-1], layer=make(4, 5, 3, dropout=0.5))
    network = bayesianize(reads, replicas=2)
    state = torch.get_rng_state()
    plain = bound(network)(x)
    first, again = (bound(network, sources(2))(x) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, plain)
    assert torch.equal(torch.get_rng_state(), state)


def test_all_calls_of_a_cell_share_one_draw_and_passes_do_not(generator):
    twice = Net(lambda m, x: torch.cat([m.cell(x), m.cell(x)], 1), cell=nn.GRUCell(4, 5))
    network = bayesianize(twice, init_std=0.5)
    network.bind(network.posterior.mean, network.posterior.variance(), network.layout)
    network.weights.noise = sources(1)
    x = torch.randn(6, 4, generator=generator)
    first, second = network(x), network(x)
    assert torch.equal(first[:, :5], first[:, 5:])
    assert not torch.equal(first, second)


def test_a_recurrent_layer_refuses_what_has_no_batch(generator):
    layer = nn.LSTM(4, 3)
    network = bayesianize(layer)
    for x, hx, message in [
        (torch.zeros(5, 4), None, r"takes a batch of sequences \(3 axes\), not shape \(5, 4\)"),
        (torch.zeros(5, 2, 4), (torch.zeros(1, 2, 4), torch.zeros(1, 2, 3)), r"shape \(1, 2, 3\), not \(1, 2, 4\)"),
    ]:
        with pytest.raises(evcl.EvclError, match=message):
            network.trunk(x, hx)
    with pytest.raises(evcl.EvclError, match=r"takes \[batch, inputs\], not shape \(4,\)"):
        bayesianize(nn.GRUCell(4, 3)).trunk(torch.zeros(4))
    assert network.trunk.flatten_parameters() is None


def test_a_layer_with_hooks_keeps_them(generator):
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    seen = []
    module[0].register_forward_hook(lambda layer, args, output: seen.append(output.shape) or 2 * output)
    network = bayesianize(module)
    x = torch.randn(5, 4, generator=generator)
    torch.testing.assert_close(bound(network)(x), module(x))
    assert len(seen) == 2


def test_only_and_skip_choose_direct_parameters(generator):
    x = torch.randn(5, 4, generator=generator)
    module = Net(lambda m, x: F.linear(x, m.a) + F.linear(x, m.b), a=torch.randn(3, 4), b=torch.randn(3, 4))
    for options in ({"only": "a"}, {"skip": "b"}):
        network = bayesianize(module, **options)
        assert network.trunk_names == ("a",)
        assert list(network.trunk.state_dict()) == ["b"]
        torch.testing.assert_close(bound(network)(x), module(x))
    with pytest.raises(evcl.EvclError, match="unknown module 'c'"):
        bayesianize(module, skip="c")


def test_a_parameter_tied_to_a_layers_weight_is_one_weight(generator):
    module, x = Net(lambda m, x: m.inner(F.linear(x, m.again).tanh())), torch.randn(5, 4, generator=generator)
    module.inner = nn.Linear(4, 4)
    module.again = module.inner.weight
    network = bayesianize(module)
    assert set(network.trunk_names) in ({"inner.weight", "inner.bias"}, {"again", "inner.bias"})
    torch.testing.assert_close(bound(network)(x), module(x))
    evcl.EWC(module, epochs=1).learn((x, [0, 1, 0, 1, 0]))
