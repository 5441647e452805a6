"""Layers against the plain layers and against drawing every weight."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from interrupted import assert_stopped_run_ends_the_same
from models import Net, bound, run_of, saved, sources
from torch import nn
from torch.nn.utils import parametrizations

import evcl
from evcl._core.randomness import GeneratorNoise, generator
from evcl.benchmarks import BENCHMARKS, Benchmark, Entry, register
from evcl.experiments import configure
from evcl.methods import TaskData
from evcl.nn import bayesianize

pytestmark = pytest.mark.usefixtures("torch_draws")


@pytest.mark.parametrize(
    ("plain", "shape"),
    [
        (lambda: nn.Linear(5, 4), (5,)),
        (lambda: nn.Linear(5, 4), (3, 5)),
        (lambda: nn.Conv1d(4, 6, 3, padding=2, padding_mode="replicate", groups=2), (4, 9)),
        (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (4, 7, 8)),
    ],
    ids=["linear", "linear along a sequence", "conv1d", "conv2d"],
)
def test_pre_activations_have_the_moments_of_drawn_weights(plain, shape, generator):
    """Mean and variance of each output, over many draws of the noise, are those that drawn weights give."""
    plain = plain().double()
    network = bayesianize(plain, init_std=0.3, dtype=torch.float64)
    network.posterior.log_std += 0.2 * torch.randn_like(network.posterior.mean)
    bound(network, GeneratorNoise([generator]))
    draws = 4000
    x = torch.randn(1, *shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():  # in many batches, since what examples of one batch draw is not independent
        y = torch.cat([network.trunk(x.expand(4, *shape)) for _ in range(draws // 4)])
    means = {name: m[0] for name, m in network.weights.mean.items()}
    variances = {name: v[0] for name, v in network.weights.variance.items()}
    expected = torch.func.functional_call(plain, means, (x,))[0]
    variance = torch.func.functional_call(plain, variances, (x**2,))[0]
    scale = (variance / draws).sqrt()
    assert ((y.mean(0) - expected).abs() < 6 * scale).all()
    torch.testing.assert_close(y.var(0), variance, rtol=0.2, atol=0)


POSITIONS = {
    "linear along a sequence": (lambda: nn.Linear(4, 3), lambda x: x.unsqueeze(1).expand(-1, 6, -1)),
    "linear along two axes": (lambda: nn.Linear(4, 3), lambda x: x.view(-1, 1, 1, 4).expand(-1, 2, 3, -1)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, groups=2), lambda x: x.unsqueeze(2).expand(-1, -1, 8)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2), lambda x: x.view(-1, 4, 1, 1).expand(-1, -1, 7, 7)),
    "linear, folded": (lambda: nn.Linear(4, 3), lambda x: x.repeat_interleave(6, 0)),
    "conv1d, folded": (lambda: nn.Conv1d(4, 6, 2), lambda x: x.repeat_interleave(6, 0).unsqueeze(2).expand(-1, -1, 3)),
    "layer norm, folded": (lambda: nn.LayerNorm(4), lambda x: x.repeat_interleave(6, 0)),
    "group norm, folded": (lambda: nn.GroupNorm(2, 4), lambda x: x.repeat_interleave(6, 0)),
    "embedding, folded": (lambda: nn.Embedding(5, 3), lambda x: x[:, 0].abs().ceil().repeat_interleave(6)),
}


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("name", POSITIONS)
def test_positions_of_an_example_share_its_weights_and_examples_do_not(name, replicas, generator):
    """Where an example's input is the same everywhere, so is its output; another example's, and replica's, is not."""
    make, spread = POSITIONS[name]
    network = bound(bayesianize(make(), init_std=0.3, replicas=replicas, dtype=torch.float64), sources(replicas))
    network.weights.batch = 5 * replicas
    if "folded" in name:
        network.trunk.fold = 6
    x = torch.randn(1, 4, generator=generator, dtype=torch.float64).expand(5 * replicas, -1)
    y = network.trunk(spread(x))
    if name.startswith("conv"):
        y = y.movedim(1, -1)
    y = y.reshape(5 * replicas, -1, y.shape[-1])
    assert y.shape[1] > 1
    torch.testing.assert_close(y, y[:, :1].expand_as(y), rtol=1e-9, atol=1e-12)
    apart = (y[:, 0].unsqueeze(0) - y[:, 0].unsqueeze(1)).abs().amax(2)
    assert (apart + torch.eye(len(y)) > 1e-3).all()


class Handed:
    """The same noise for every call with as many numbers."""

    def normal_(self, out):
        return out.normal_(generator=torch.Generator().manual_seed(out.numel()))

    def shared(self):
        return self


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(50, 40), (50,)),
        (nn.Conv2d(8, 12, 3), (8, 7, 7)),
        (nn.Sequential(nn.Conv2d(8, 12, 3, bias=False), nn.GroupNorm(3, 12)), (8, 7, 7)),
    ],
)
def test_products_in_bf16_are_close_and_the_state_stays_float32(layer, shape, generator):
    network = bayesianize(layer, init_std=0.1)
    x = torch.randn(64, *shape, generator=generator)
    found = []
    for low in (None, torch.bfloat16):
        flat = torch.zeros_like(network.posterior.mean), torch.zeros_like(network.posterior.mean)
        bound(network, Handed(), grads=flat)
        network.weights.compute_dtype, network.weights.batch = low, len(x)
        y = network.trunk(x)
        y.square().mean().backward()
        network.collect_gradients()
        found.append((y, *flat))
    assert found[1][1].dtype == found[1][2].dtype == torch.float32
    for exact, rough in zip(*found, strict=True):
        assert (rough - exact).norm() < 0.02 * exact.norm()
        assert not torch.equal(rough, exact)


def test_a_row_of_zeros_without_a_bias_has_a_gradient(generator):
    network = bound(bayesianize(nn.Linear(3, 2, bias=False), init_std=0.1), GeneratorNoise([generator]))
    out = network(torch.zeros(4, 3))
    grads = torch.autograd.grad(out.square().sum() + out.sum(), network.leaves(network.layout))
    assert all(g.isfinite().all() for g in grads)


def test_dropout_of_channels_keeps_the_expectation_and_is_off_in_prediction(generator):
    network = bayesianize(nn.Sequential(nn.Dropout2d(0.25), nn.Flatten(), nn.Linear(32, 2)))
    dropout = network.trunk[0]
    x = torch.ones(2000, 8, 2, 2)
    assert torch.equal(dropout(x), x)
    network.weights.noise = GeneratorNoise([generator])
    y = dropout(x)
    assert y.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert abs(float(y.mean()) - 1) < 0.03
    assert (y.flatten(2).std(2) == 0).all()


def test_tied_weights_share_one_slice():
    def run(m, x):
        return m.out(m.again(m.second(m.first(x).relu()).relu()) + x)

    plain = Net(run, first=nn.Linear(4, 4), second=nn.Linear(4, 4), out=nn.Linear(4, 3))
    plain.second.weight = plain.first.weight
    plain.again = plain.first  # the same layer under a second name
    network, x = bayesianize(plain), torch.ones(2, 4)
    assert list(network.layout.shapes) == ["first.weight", "first.bias", "second.bias", "out.weight", "out.bias"]
    torch.testing.assert_close(bound(network, drawn=False)(x), plain(x))


def table_and_matrices(tied):
    def run(m, x):
        return m.second(m.first(m.table(x)).tanh()).mean(1)

    net = Net(run, table=nn.Embedding(4, 4), first=nn.Linear(4, 4), second=nn.Linear(4, 4, bias=False))
    if tied:
        net.first.weight = net.second.weight = net.table.weight
    return net


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_gradients_of_tied_weights_add_up(replicas, generator):
    """For the same noise, the gradient of one weight used three times is the sum of three equal weights'."""
    found = {}
    shared = torch.randn(replicas, 4, 4, generator=generator, dtype=torch.float64)
    x = torch.randint(4, (replicas * 5, 3), generator=generator)
    for tied in (True, False):
        network = bayesianize(table_and_matrices(tied), init_std=0.3, replicas=replicas, dtype=torch.float64)
        for name, view in network.layout.views(network.posterior.mean).items():
            view.copy_(shared if "weight" in name else torch.zeros_like(view))
        grads = torch.zeros_like(network.posterior.mean), torch.zeros_like(network.posterior.mean)
        bound(network, Handed(), grads=grads)(x).square().sum().backward()
        network.collect_gradients()
        found[tied] = [network.layout.views(flat) for flat in grads]
    for one, three in zip(found[True], found[False], strict=True):
        assert list(one) == ["table.weight", "first.bias"]
        torch.testing.assert_close(one["table.weight"], sum(three[f"{n}.weight"] for n in ("table", "first", "second")))


def test_attention_drops_weights_in_training_alone(generator):
    network = bayesianize(nn.MultiheadAttention(8, 2, dropout=0.25, batch_first=True), init_std=None)
    x = torch.randn(200, 6, 8, generator=generator)
    _, kept = network.trunk(x, x, x, average_attn_weights=False)
    network.weights.noise = GeneratorNoise([generator])
    _, dropped = network.trunk(x, x, x, average_attn_weights=False)
    gone = dropped == 0
    assert abs(float(gone.double().mean()) - 0.25) < 0.01
    torch.testing.assert_close(dropped[~gone], kept[~gone] / 0.75)


def test_the_users_module_is_left_alone():
    plain = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    before = {name: p.clone() for name, p in plain.named_parameters()}
    learner = evcl.EVCL(plain, epochs=1)
    learner.learn((torch.eye(3), [0, 1, 1]))
    assert all(torch.equal(p, before[name]) for name, p in plain.named_parameters())
    assert type(plain[0]) is nn.Linear


def test_means_start_from_the_module_or_he_uniform():
    plain = nn.Sequential(nn.Linear(50, 40), nn.ReLU())
    kept = bayesianize(plain)
    assert torch.equal(kept.layout.views(kept.posterior.mean)["0.weight"][0], plain[0].weight)
    sources = [torch.Generator().manual_seed(s) for s in (1, 2)]
    drawn = bayesianize(plain, generators=sources)
    views = drawn.layout.views(drawn.posterior.mean)
    bound = (6 / 50) ** 0.5
    for name in ("0.weight", "0.bias"):
        assert views[name].abs().max() <= bound
    assert views["0.weight"].abs().max() > 0.98 * bound
    assert abs(float(views["0.weight"].std()) - bound / 3**0.5) < 0.01
    assert not torch.equal(views["0.weight"][0], views["0.weight"][1])


class Scale(Net):
    def __init__(self):
        super().__init__(lambda m, x: x * m.gamma, gamma=torch.ones(3))


def test_an_unknown_layer_learns_or_is_named_and_stays_as_it_is():
    module = nn.Sequential(nn.Linear(3, 3), Scale())
    assert list(bayesianize(module).layout.shapes) == ["0.weight", "0.bias", "1.gamma"]
    with pytest.warns(UserWarning, match=r"leaves these weights fixed .*: '1.gamma' \(Scale\)\. Leave it out"):
        network = bayesianize(module, unsupported="deterministic")
    assert list(network.layout.shapes) == ["0.weight", "0.bias"]
    assert network.frozen == {"1.gamma": "Scale"}


def test_a_registered_layer_takes_part(registered):
    class BayesianScale(evcl.nn.BayesianLayer):
        def forward(self, x):
            x = self.unfold(x)
            return (x * self.mean("gamma").unsqueeze(1)).flatten(0, 1)

        def example_gradient(self, parameter, x, delta):
            return x * delta

    registered(Scale, BayesianScale)
    learner = evcl.EWC(nn.Sequential(nn.Linear(3, 3), Scale()), epochs=3)
    learner.learn((torch.eye(3), [0, 1, 1]))
    network = learner.state.run.network
    assert not torch.equal(network.layout.view(network.posterior.mean, "1.gamma"), torch.ones(1, 3))
    assert (network.layout.view(learner.state.run.memory.importance, "1.gamma") > 0).any()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3, affine=False)), "mixes the examples of a batch"),
        (lambda: nn.BatchNorm1d(3, track_running_stats=False), "depend on its batch"),
        (lambda: nn.Embedding(3, 3, max_norm=1.0), "max_norm or scale_grad_by_freq"),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.RReLU()), "global generator"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), "'0.weight' has no shape yet: call the network on a batch once"),
        (lambda: nn.Linear(4, 3, device="meta"), "'weight' is on the device 'meta' and has no values"),
        (lambda: nn.Linear(4, 3, dtype=torch.complex64), "'weight' is torch.complex64"),
        (lambda: torch.jit.trace(nn.Linear(4, 3), torch.zeros(1, 4)), "pass the module that it was made from"),
        (lambda: "a network", "must be a torch.nn.Module, not str"),
    ],
)
def test_what_cannot_be_converted_is_refused(make, message):
    with pytest.raises(evcl.EvclError, match=message):
        bayesianize(make())


@pytest.mark.parametrize("frozen", [("0.weight", "0.bias"), ("0.weight",)])
def test_what_is_frozen_stays_as_it_is_and_the_rest_learns(frozen):
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    learner = evcl.EVCL(module, epochs=2)
    learner.learn((torch.eye(3), [0, 1, 1]))
    others = [name for name, _ in module.named_parameters() if name not in frozen]
    assert list(learner.state.run.network.trunk_names) == others
    plain = learner.mean_network()[0]
    for name, p in module.named_parameters():
        assert torch.equal(plain.get_parameter(name), p) == (name in frozen)


def test_of_a_partly_frozen_lstm_the_rest_learns():
    module, x = (
        Net(lambda m, x: m.reads(x)[0][:, -1], reads=nn.LSTM(3, 3, batch_first=True)),
        torch.eye(6).view(6, 2, 3),
    )
    module.reads.weight_hh_l0.requires_grad_(False)
    learner = evcl.EWC(module, epochs=5)
    learner.learn((x, [0, 1] * 3))
    plain = learner.mean_network()
    moved = {key: not torch.equal(p, module.reads.get_parameter(key)) for key, p in plain[0].reads.named_parameters()}
    assert moved == {"weight_ih_l0": True, "weight_hh_l0": False, "bias_ih_l0": True, "bias_hh_l0": True}
    torch.testing.assert_close(plain(x).softmax(1), learner.predict_proba(x))


SPECTRAL_NORMS = [parametrizations.spectral_norm, nn.utils.spectral_norm]


@pytest.mark.filterwarnings("ignore:.*spectral_norm. is deprecated")
@pytest.mark.parametrize("norm", SPECTRAL_NORMS, ids=["parametrised", "by a hook"])
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
        network.begin()
        bound(network, sources(3) if step < 3 else None, drawn=False)
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


@pytest.mark.filterwarnings("ignore:.*spectral_norm. is deprecated")
@pytest.mark.parametrize("norm", SPECTRAL_NORMS, ids=["parametrised", "by a hook"])
def test_a_network_with_a_spectral_norm_is_saved_and_becomes_plain(norm, generator, tmp_path):
    def make():
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return nn.Sequential(norm(nn.Linear(4, 8)), nn.Tanh())

    x, y = torch.randn(40, 4, generator=generator), torch.arange(40) % 2
    learner = evcl.EVCL(make(), epochs=10, lr=0.05, tempering=1e-4)
    learner.learn((x + y.unsqueeze(1), y))
    p = learner.predict_proba(x)
    assert torch.equal(learner.predict_proba(x), p)
    again = saved(learner, tmp_path, x, make())
    plain = again.mean_network()
    at_mean = learner.state.run.predict(x[None], 0, [learner.state.run.network.posterior.mean])[0]
    torch.testing.assert_close(plain(x).softmax(1), at_mean)
    largest = torch.linalg.matrix_norm(plain[0][0].weight, 2)
    assert abs(float(largest.detach()) - 1) < 0.05


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_layers_is_the_runs_noise(make, generator):
    x = torch.randn(2 * 6, 3, 4, generator=generator)
    reads = Net(lambda m, x: m.layer(x.transpose(0, 1))[0][-1], layer=make(4, 5, 3, dropout=0.5))
    network = bayesianize(reads, replicas=2)
    state = torch.get_rng_state()
    plain = bound(network, drawn=False)(x)
    first, again = (bound(network, sources(2), drawn=False)(x) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, plain)
    assert torch.equal(torch.get_rng_state(), state)


def test_all_calls_of_a_cell_share_one_draw_and_passes_do_not(generator):
    twice = Net(lambda m, x: torch.cat([m.cell(x), m.cell(x)], 1), cell=nn.GRUCell(4, 5))
    network = bound(bayesianize(twice, init_std=0.5), sources(1))
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
    torch.testing.assert_close(bound(network, drawn=False)(x), module(x))
    assert len(seen) == 2


def test_only_and_skip_choose_direct_parameters(generator):
    x = torch.randn(5, 4, generator=generator)
    module = Net(lambda m, x: F.linear(x, m.a) + F.linear(x, m.b), a=torch.randn(3, 4), b=torch.randn(3, 4))
    for options in ({"only": "a"}, {"skip": "b"}):
        network = bayesianize(module, **options)
        assert network.trunk_names == ("a",)
        assert list(network.trunk.state_dict()) == ["b"]
        torch.testing.assert_close(bound(network, drawn=False)(x), module(x))
    with pytest.raises(evcl.EvclError, match="unknown module 'c'"):
        bayesianize(module, skip="c")


def test_a_parameter_tied_to_a_layers_weight_is_one_weight(generator):
    module, x = Net(lambda m, x: m.inner(F.linear(x, m.again).tanh())), torch.randn(5, 4, generator=generator)
    module.inner = nn.Linear(4, 4)
    module.again = module.inner.weight
    network = bayesianize(module)
    assert set(network.trunk_names) in ({"inner.weight", "inner.bias"}, {"again", "inner.bias"})
    torch.testing.assert_close(bound(network, drawn=False)(x), module(x))
    evcl.EWC(module, epochs=1).learn((x, [0, 1, 0, 1, 0]))


F64 = torch.float64


def digits(tasks=2):
    return evcl.benchmarks.get("split-digits", tasks=tasks)


def trained(seeds, method="naive", rounds=2, **dropped):
    how = {"epochs": 2, "batch_size": 20, "lr": 0.01}
    run = run_of(evcl.nn.mlp(6, [12, 12], **dropped), method, seeds, draw=True, dtype=F64, **how)
    run.add_heads(12, [2, 2])
    for k in range(rounds):
        x = torch.randn(1, 50, 6, generator=generator(0, "task", k), dtype=F64)
        run.learn([TaskData(x, (x[:, :, k] > 0).long(), k, task=k)])
    return run


def test_a_dropped_unit_is_0_and_the_others_are_scaled_up():
    network = bayesianize(evcl.nn.mlp(50, [40, 30], dropout=0.5, input_dropout=0.2), init_std=None, dtype=F64)
    x = torch.randn(200, 50, generator=generator(0, "x"), dtype=F64)
    network.weights.noise = GeneratorNoise([generator(0, "noise")])
    found = network(x)
    source = generator(0, "noise")  # the same draws, in the order of the layers
    h = x * (torch.empty_like(x).uniform_(generator=source) >= 0.2) / 0.8
    views = network.layout.views(network.posterior.mean)
    names = list(views)
    for weight, bias in zip(names[::2], names[1::2], strict=True):
        h = torch.relu(h @ views[weight][0].T + views[bias][0])
        keep = torch.empty_like(h).uniform_(generator=source) >= 0.5
        assert 0.45 < float(keep.double().mean()) < 0.55
        h = h * keep / 0.5
    torch.testing.assert_close(found, h)


def test_predictions_drop_nothing():
    dropped, plain = (evcl.nn.mlp(6, [12], dropout=p, input_dropout=p) for p in (0.5, 0.0))
    plain.load_state_dict(dict(zip(plain.state_dict(), dropped.state_dict().values(), strict=True)))
    x = torch.randn(20, 6, generator=generator(0, "x"))
    networks = [bayesianize(one, init_std=None) for one in (dropped, plain)]
    assert torch.equal(*(network(x) for network in networks))
    assert not any(isinstance(m, nn.Dropout) for m in plain)
    assert torch.equal(dropped.eval()(x), plain(x))


def test_torch_s_global_generator_is_neither_used_nor_moved():
    found = []
    for seed in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            found.append(trained([0], dropout=0.5, input_dropout=0.2).network.posterior.mean)
            assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*found)
    assert not torch.allclose(found[0], trained([0]).network.posterior.mean, atol=1e-3)


@pytest.mark.parametrize("method", ["naive", "ewc", "evcl"])
def test_replicas_are_their_solo_runs(method):
    beside = trained([3, 4, 5], method, dropout=0.5, input_dropout=0.2)
    for r in range(3):
        alone = trained([3 + r], method, dropout=0.5, input_dropout=0.2)
        torch.testing.assert_close(
            beside.network.posterior.mean[r], alone.network.posterior.mean[0], rtol=1e-9, atol=1e-10
        )


def test_a_saved_learner_goes_on_dropping(tmp_path):
    first = evcl.Learner(evcl.nn.mlp(64, [20], dropout=0.4, input_dropout=0.1), "naive", seed=3, epochs=2)
    first.learn(digits()[0])
    learners = [first, saved(first, tmp_path, digits()[0].test.x)]
    for learner in learners:
        learner.learn(digits()[1])
    assert torch.equal(*(learner.state.run.network.posterior.mean for learner in learners))
    without = evcl.Learner(evcl.nn.mlp(64, [20]), "naive", seed=3, epochs=2)
    for task in digits():
        without.learn(task)
    assert not torch.allclose(
        without.state.run.network.posterior.mean, learners[0].state.run.network.posterior.mean, atol=1e-3
    )


@pytest.fixture
def benchmark():
    def network():
        return evcl.nn.mlp(64, [20], dropout=0.4, input_dropout=0.1)

    def build(request):
        return Benchmark("dropped", digits(), network=network, seed=request.seed)

    register(Entry("dropped", "digits, with dropout", build, seeded=False))
    yield "dropped"
    BENCHMARKS.remove("dropped")


def test_stopped_within_an_epoch_it_ends_to_the_bit_where_it_would_have(benchmark, tmp_path):
    config = configure(benchmark, "naive", "default", (0, 1), 2, {"epochs": 2, "batch_size": 20})
    assert_stopped_run_ends_the_same(config, tmp_path)


def test_mlp_checks_its_widths_and_probabilities():
    for inputs, hidden in ((0, [3]), (3, [0]), (3, [2.5]), (True, [3])):
        with pytest.raises(evcl.EvclError, match="mlp takes"):
            evcl.nn.mlp(inputs, hidden)
    for given in ({"dropout": 1.0}, {"input_dropout": -0.1}, {"dropout": "half"}, {"dropout": True}):
        with pytest.raises(evcl.EvclError, match="at least 0 and below 1"):
            evcl.nn.mlp(3, [3], **given)
