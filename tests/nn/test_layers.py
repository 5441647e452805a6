"""Layers against the plain layers and against drawing every weight."""

from __future__ import annotations

import pytest
import torch
from models import Net
from torch import nn

import evcl
from evcl._core.randomness import GeneratorNoise
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
    mean = network.posterior.mean
    network.posterior.log_std += 0.2 * torch.randn(mean.shape, generator=generator, dtype=torch.float64)
    network.bind(mean, network.posterior.variance(), network.layout)
    network.weights.noise = GeneratorNoise([generator])
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
    network = bayesianize(make(), init_std=0.3, replicas=replicas, dtype=torch.float64)
    network.bind(network.posterior.mean, network.posterior.variance(), network.layout)
    network.weights.noise = GeneratorNoise([torch.Generator().manual_seed(r) for r in range(replicas)])
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


@pytest.mark.parametrize("name", ["linear along a sequence", "conv2d", "conv1d, folded"])
def test_a_replica_of_a_layer_with_positions_draws_what_it_draws_alone(name, generator):
    make, spread = POSITIONS[name]
    network = bayesianize(make(), init_std=0.3, replicas=3, dtype=torch.float64)
    mean, variance = network.posterior.mean, network.posterior.variance()
    network.trunk.fold = 6 if "folded" in name else 1
    x = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)

    def passed(rows):
        network.bind(mean[rows], variance[rows], network.layout)
        network.weights.noise = GeneratorNoise([torch.Generator().manual_seed(r) for r in rows])
        network.weights.batch = 5 * len(rows)
        return network.trunk(spread(x[rows].flatten(0, 1))).unflatten(0, (len(rows), -1))

    whole = passed([0, 1, 2])
    for r in range(3):
        torch.testing.assert_close(passed([r])[0], whole[r], rtol=1e-12, atol=1e-12)


class Handed:
    """The same noise for every call with as many numbers."""

    def normal_(self, out):
        return out.normal_(generator=torch.Generator().manual_seed(out.numel()))

    def shared(self):
        return self


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("bayesian", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (2, 5)], ids=["rows", "sequence"])
def test_the_training_pass_written_out_is_autograds(replicas, bayesian, bias, shape, generator):
    """Outputs, gradients of the input, and gradients in the flat buffers: the mean's, and twice the variance's."""
    plain = nn.Sequential(nn.Linear(5, 4, bias=bias), nn.ReLU(inplace=True), nn.Linear(4, 3, bias=bias)).double()
    network = bayesianize(plain, init_std=0.3, replicas=replicas, dtype=torch.float64)
    mean = network.posterior.mean + torch.randn(network.posterior.mean.shape, generator=generator, dtype=torch.float64)
    variance = network.posterior.variance() if bayesian else None
    x = torch.randn(replicas * 7, *shape, generator=generator, dtype=torch.float64)
    up = torch.randn(replicas * 7, *shape[:-1], 3, generator=generator, dtype=torch.float64)
    network.weights.noise = Handed()

    slow_x = x.clone().requires_grad_()
    network.bind(mean, variance, network.layout)
    leaves = network.leaves(network.layout)
    slow = network.trunk(slow_x)
    grads = torch.autograd.grad((slow * up).sum(), [slow_x, *leaves])
    half = len(network.layout.shapes)
    wanted = [torch.cat([g.flatten(1) for g in part], 1) for part in (grads[1 : 1 + half], grads[1 + half :]) if part]

    fast_x = x.clone().requires_grad_()
    flat = torch.zeros_like(mean), torch.zeros_like(mean) if bayesian else None
    network.bind(mean, variance, network.layout, flat)
    fast = network.trunk(fast_x)
    (fast * up).sum().backward()
    network.collect_gradients()
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(fast, slow, **close)
    torch.testing.assert_close(fast_x.grad, grads[0], **close)
    torch.testing.assert_close(flat[0], wanted[0], **close)
    if bayesian:
        torch.testing.assert_close(flat[1], 2 * wanted[1], **close)


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
        network.weights.noise, network.weights.compute_dtype = Handed(), low
        flat = torch.zeros_like(network.posterior.mean), torch.zeros_like(network.posterior.mean)
        network.bind(network.posterior.mean, network.posterior.variance(), network.layout, flat)
        network.weights.batch = len(x)
        y = network.trunk(x)
        y.square().mean().backward()
        network.collect_gradients()
        found.append((y, *flat))
    assert found[1][1].dtype == found[1][2].dtype == torch.float32
    for exact, rough in zip(*found, strict=True):
        assert (rough - exact).norm() < 0.02 * exact.norm()
        assert not torch.equal(rough, exact)


def test_a_row_of_zeros_without_a_bias_has_a_gradient(generator):
    network = bayesianize(nn.Linear(3, 2, bias=False), init_std=0.1)
    network.bind(network.posterior.mean, network.posterior.variance(), network.layout)
    leaves = network.leaves(network.layout)
    network.weights.noise = GeneratorNoise([generator])
    out = network(torch.zeros(4, 3))
    grads = torch.autograd.grad(out.square().sum() + out.sum(), leaves)
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize(("layer", "positions"), [(nn.Dropout(0.25), 0), (nn.Dropout2d(0.25), 2)])
def test_dropout_keeps_the_expectation_and_is_off_in_prediction(layer, positions, generator):
    network = bayesianize(nn.Sequential(layer, nn.Flatten(), nn.Linear(32, 2)))
    dropout = network.trunk[0]
    x = torch.ones(2000, 8, 2, 2)
    network.weights.noise = None
    assert torch.equal(dropout(x), x)
    network.weights.noise = GeneratorNoise([generator])
    y = dropout(x)
    assert y.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert abs(float(y.mean()) - 1) < 0.03
    whole_channels = (y.flatten(2).std(2) == 0).all()
    assert bool(whole_channels) == (positions == 2)


def test_tied_weights_share_one_slice():
    def run(m, x):
        return m.out(m.again(m.second(m.first(x).relu()).relu()) + x)

    plain = Net(run, first=nn.Linear(4, 4), second=nn.Linear(4, 4), out=nn.Linear(4, 3))
    plain.second.weight = plain.first.weight
    plain.again = plain.first  # the same layer under a second name
    network, x = bayesianize(plain), torch.ones(2, 4)
    assert list(network.layout.shapes) == ["first.weight", "first.bias", "second.bias", "out.weight", "out.bias"]
    network.bind(network.posterior.mean, None, network.layout)
    torch.testing.assert_close(network(x), plain(x))


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
        network.bind(network.posterior.mean, network.posterior.variance(), network.layout, grads)
        network.weights.noise = Handed()
        network(x).square().sum().backward()
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


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.gamma


def test_an_unknown_layer_learns_or_is_named_and_stays_as_it_is():
    module = nn.Sequential(nn.Linear(3, 3), Scale())
    assert list(bayesianize(module).layout.shapes) == ["0.weight", "0.bias", "1.gamma"]
    with pytest.warns(UserWarning, match=r"leaves these weights fixed .*: '1.gamma' \(Scale\)\. Leave it out"):
        network = bayesianize(module, unsupported="deterministic")
    assert list(network.layout.shapes) == ["0.weight", "0.bias"]
    assert network.frozen == {"1.gamma": "Scale"}


def test_a_registered_layer_takes_part():
    class BayesianScale(evcl.nn.BayesianLayer):
        def forward(self, x):
            x = self.unfold(x)
            return (x * self.mean("gamma").unsqueeze(1)).flatten(0, 1)

        def example_gradient(self, parameter, x, delta):
            return x * delta

    evcl.nn.register(Scale, BayesianScale)
    try:
        learner = evcl.EWC(nn.Sequential(nn.Linear(3, 3), Scale()), epochs=3)
        learner.learn((torch.eye(3), [0, 1, 1]))
        network = learner.parts.run.network
        views = network.layout.views(network.posterior.mean)
        assert "1.gamma" in views
        assert not torch.equal(views["1.gamma"], torch.ones(1, 3))
        assert (network.layout.views(learner.parts.run.memory.importance)["1.gamma"] > 0).any()
    finally:
        from evcl.nn import convert

        del convert._FORMS[Scale]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3, affine=False)), "mixes the examples of a batch"),
        (nn.BatchNorm1d(3, track_running_stats=False), "depend on its batch"),
        (nn.Embedding(3, 3, max_norm=1.0), "max_norm or scale_grad_by_freq"),
        (nn.Sequential(nn.Linear(3, 3), nn.RReLU()), "global generator"),
        ("a network", "must be a torch.nn.Module, not str"),
    ],
)
def test_what_cannot_be_converted_is_refused(module, message):
    with pytest.raises(evcl.EvclError, match=message):
        bayesianize(module)


@pytest.mark.parametrize("frozen", [("0.weight", "0.bias"), ("0.weight",)])
def test_what_is_frozen_stays_as_it_is_and_the_rest_learns(frozen):
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    learner = evcl.EVCL(module, epochs=2)
    learner.learn((torch.eye(3), [0, 1, 1]))
    others = [name for name, _ in module.named_parameters() if name not in frozen]
    assert list(learner.parts.run.network.trunk_names) == others
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


def test_mlp_checks_its_widths():
    for inputs, hidden in ((0, [3]), (3, [0]), (3, [2.5]), (True, [3])):
        with pytest.raises(evcl.EvclError, match="mlp takes"):
            evcl.nn.mlp(inputs, hidden)
