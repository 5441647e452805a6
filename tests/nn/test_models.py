"""Whole networks: taken up, taught, saved, loaded; refused where they cannot be."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from models import MODELS, Net, bound, gpt, images, resnet, run_of, saved, sentences, sources, vit
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import evcl
from evcl.curvature import Sample, fisher, kfac
from evcl.nn import bayesianize, head, outputs
from evcl.nn.sizes import Size, measured
from evcl.training import Step, TaskData

pytestmark = pytest.mark.usefixtures("torch_draws")


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_it_learns_two_tasks_and_is_saved_and_loaded(name, generator, tmp_path):
    make, data = MODELS[name]
    module = make()
    how = {"epochs": 20, "lr": 0.01, "batch_size": 13, "strength": 1.0, "distill": 1.0}
    learner = evcl.EVCL(module, **how, seed=3, init_std=0.02, std_lr_scale=1.0, tempering=1e-3)
    tasks = [data(generator, k) for k in range(2)]
    for x, y in tasks:
        learner.learn((x, y))
    for k, (x, y) in enumerate(tasks):
        assert (learner.predict(x, k) == y).double().mean() >= 0.9
    x = tasks[0][0]
    again = saved(learner, tmp_path, x, make(), 0)
    plain = again.mean_network(0)
    assert {type(m).__name__ for m in plain.modules()} >= {type(m).__name__ for m in module.modules()}
    mean = again.state.run.predict(x[None].float(), 0, [again.state.run.network.posterior.mean])[0]
    torch.testing.assert_close(plain(x).softmax(1), mean, rtol=1e-4, atol=1e-5)
    for one in (learner, again):  # both go on as one
        one.learn(tasks[1], task="more", epochs=1)
    assert torch.equal(again.predict_proba(x, 2), learner.predict_proba(x, 2))


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_three_replicas_are_three_networks(name, generator):
    """Each with its own weights and statistics: as it would be alone, given its part of the noise."""
    make, data = MODELS[name]
    module, how = make(), {"epochs": 2, "lr": 0.01, "batch_size": 13, "fisher_examples": 7}
    how |= {"posterior": "diagonal", "std_rate": 0.01}  # matrices, and sigma set in one step, carry rounding further
    x, y = data(generator, 0)

    def trained(seeds):
        run = run_of(module, "evcl", seeds, draw=True, dtype=torch.float64, **how)
        task = TaskData(x[None].double(), y[None], run.add_head(run.features(x[:1].double()), 2))
        run.learn([task])
        return run, run.predict(task.x, 0)

    together, p = trained([5, 6, 7])
    for r, seed in enumerate([5, 6, 7]):
        alone, q = trained([seed])
        torch.testing.assert_close(p[r], q[0], rtol=1e-7, atol=1e-9)
        for key, tensor in alone.tensors().items():
            torch.testing.assert_close(together.tensors()[key][r], tensor[0], rtol=1e-6, atol=1e-9)
    assert not torch.equal(p[0], p[1])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_a_pretrained_network_starts_as_it_is(name, dtype, generator):
    """With a tiny sigma, predictions through the head are those of the plain network."""
    make, data = MODELS[name]
    module = make().to(dtype)
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):  # a network that has seen data
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            norm.num_batches_tracked += 7
    x = data(generator, 0)[0]
    run = run_of(module, "evcl", range(3), dtype=dtype, init_std=1e-8)
    like = x.to(dtype)
    run.add_head(run.features(like[:1]), 2)
    found = run.predict(like[None], 0)
    features = module.eval()(x if x.dtype == torch.long else like)
    for r in range(3):
        weight, bias = (
            run.network.layout.view(run.network.posterior.mean, f"head 0.{k}")[r] for k in ("weight", "bias")
        )
        torch.testing.assert_close(found[r], F.linear(features, weight, bias).softmax(1), rtol=1e-4, atol=1e-5)


def test_torchs_fast_path_does_not_go_past_the_layers(generator):
    """In evaluation mode, without gradients: the case that it is made for."""
    x, y = images(generator, 0)
    learner = evcl.VCL(vit(), epochs=2, init_std=0.5, std_lr_scale=1e-3)
    learner.learn((x, y))
    run = learner.state.run
    draws = list(run.draws([0]))
    assert not torch.allclose(run.predict(x[None], 0, draws[:1]), run.predict(x[None], 0, draws[1:2]), atol=1e-3)
    skipped = evcl.VCL(vit(), epochs=1, skip="*.self_attn")  # plain attention beside Bayesian layers
    skipped.learn((x, y))
    assert skipped.predict(x).shape == (40,)


class Operations(TorchDispatchMode):
    """Notes the operations that would have a GPU's host wait."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal.default")

    def __init__(self):
        super().__init__()
        self.waiting, self.count = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        picks = func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put) and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if picks or any(word in str(func) for word in self.WAITING):
            self.waiting.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("replicas", [1, 3])
def test_no_step_waits_for_the_device(name, replicas, generator, monkeypatch):
    """A step must go into a CUDA graph: nothing in it may need a tensor's value in Python."""
    make, data = MODELS[name]
    seen = Operations()
    step = Step.__call__

    def watched(self, rows, noise):
        with seen:
            return step(self, rows, noise)

    monkeypatch.setattr(Step, "__call__", watched)
    x, y = data(generator, 0)
    run = run_of(make(), "evcl", range(replicas), epochs=1)
    run.learn([TaskData(x[None].float(), y[None], run.add_head(run.features(x[:1].float()), 2))])
    assert seen.count > 100
    assert seen.waiting == []
    assert run.network.capturable == (name != "LSTM")  # the lengths of packed sequences are on the host


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_a_gpu_learns_as_well(name, dtype, generator):
    """By CUDA graphs, three replicas at once; and a learner, which then predicts the same on a CPU."""
    make, data = MODELS[name]
    tasks = [data(generator, k) for k in range(2)]
    how = {"epochs": 20, "lr": 0.01, "batch_size": 13, "strength": 1.0, "init_std": 0.02, "std_lr_scale": 1.0}
    run = run_of(make(), "evcl", range(3), device="cuda", dtype=dtype, **how, tempering=1e-3)
    for k, (x, y) in enumerate(tasks):
        x, y = x[None].to("cuda", dtype), y[None].cuda()
        run.learn([TaskData(x, y, run.add_head(run.features(x[0, :1]), 2))])
        assert (run.predict(x, k).argmax(2) == y).double().mean() > 0.8
    learner = evcl.EVCL(make(), **how, tempering=1e-3, device="cuda", dtype=dtype)
    x, y = tasks[0]
    learner.learn((x, y))
    on_gpu = learner.predict_proba(x)
    torch.testing.assert_close(learner.to("cpu").predict_proba(x), on_gpu, rtol=1e-3, atol=1e-3)
    assert (on_gpu.argmax(1) == y).double().mean() > 0.8


# --- batch norm ------------------------------------------------------------------------------------------------------


def statistics(learner):
    return {name: t.clone() for name, t in learner.state.run.network.statistics().items()}


def test_batch_norm_is_measured_in_the_first_task_and_then_fixed(generator):
    tasks = [images(generator, k, 41) for k in range(2)]  # the last batch is of one example
    learner = evcl.EVCL(resnet(), epochs=3, batch_size=10)
    before = statistics(learner)
    learner.learn(tasks[0])
    first = statistics(learner)
    assert int(first["stem.1.num_batches_tracked"]) == 15
    assert not torch.equal(first["stem.1.running_mean"], before["stem.1.running_mean"])
    learner.learn(tasks[1])
    assert all(torch.equal(t, first[name]) for name, t in statistics(learner).items())
    plain = learner.mean_network(0)[0]
    assert torch.equal(plain.stem[1].running_var, first["stem.1.running_var"][0])


def test_the_statistics_are_torchs(generator):
    """Of one step, and as a mean over all batches where momentum is None."""
    x = torch.randn(3, 20, 4, generator=generator)
    for momentum in (0.3, None):
        plain = nn.BatchNorm1d(4, momentum=momentum)
        network = bayesianize(plain, replicas=3)
        network.begin()
        bound(network, sources(3), drawn=False)  # in training, where nothing is drawn
        own = [copy.deepcopy(plain).train() for _ in range(3)]
        for step in (x, 2 * x + 1):
            y = network(step.flatten(0, 1))
            wanted = torch.stack([norm(part) for norm, part in zip(own, step, strict=True)])
            torch.testing.assert_close(y, wanted.flatten(0, 1))
        for key, found in network.statistics().items():
            torch.testing.assert_close(found, torch.stack([getattr(norm, key) for norm in own]))


def test_a_task_that_fails_leaves_the_statistics_as_they_were(generator):
    learner = evcl.EVCL(resnet(), epochs=3, batch_size=10)
    before, data = statistics(learner), images(generator, 0)

    class Stop(evcl.Callback):
        def end_epoch(self, epoch):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learner.learn(data, callbacks=[Stop()])
    assert all(torch.equal(t, before[name]) for name, t in statistics(learner).items())
    learner.learn(data)
    assert int(statistics(learner)["stem.1.num_batches_tracked"]) == 12


def test_a_network_that_has_seen_data_keeps_its_statistics(generator):
    module = resnet()
    module(images(generator, 0)[0])
    learner = evcl.EVCL(module, epochs=1)
    learner.learn(images(generator, 1))
    assert torch.equal(statistics(learner)["stem.1.running_mean"][0], module.stem[1].running_mean)


# --- parts of a network ----------------------------------------------------------------------------------------------


def test_only_and_skip_choose_what_learns(generator):
    module = resnet()
    all_names = set(bayesianize(module).trunk_names)
    only = set(bayesianize(module, only="layer2").trunk_names)
    assert only == {name for name in all_names if name.startswith("layer2.")}
    assert set(bayesianize(module, skip="layer2").trunk_names) == all_names - only
    norms = set(bayesianize(module, only=["*.bn?", "stem.1", "layer2.down.1"]).trunk_names)
    assert norms == {
        name for name in all_names if "conv" not in name and name not in ("stem.0.weight", "layer2.down.0.weight")
    }
    both = set(bayesianize(module, only="layer2", skip=["layer2.down"]).trunk_names)
    assert both == {name for name in only if "down" not in name}
    assert bayesianize(module, only=[]).trunk_names == ()
    assert set(bayesianize(vit(), only="positions").trunk_names) == {"positions"}


def test_what_is_left_out_stays_as_it_is(generator, tmp_path):
    """Weights, statistics, and no dropout: a frozen backbone with Bayesian last layers."""
    module = nn.Sequential(resnet(), nn.Dropout(0.5), nn.Linear(8, 6), nn.ReLU())
    before = {name: t.clone() for name, t in module.state_dict().items()}
    learner = evcl.EVCL(module, only="2", epochs=20, lr=0.02)
    x, y = images(generator, 0)
    learner.learn((x, y))
    assert list(learner.state.run.network.trunk_names) == ["2.weight", "2.bias"]
    after = learner.mean_network()[0].state_dict()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert moved == ["2.weight", "2.bias"]
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    again = saved(learner, tmp_path, x, module)
    assert list(again.state.run.network.trunk_names) == ["2.weight", "2.bias"]


def test_a_frozen_embedding_takes_what_a_learner_hands_on(generator):
    x, y = sentences(generator, 0)
    learner = evcl.EVCL(gpt(), skip="tokens", epochs=15, lr=0.01)
    learner.learn((x, y))
    assert (learner.predict(x) == y).double().mean() > 0.9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": "layer3"}, "unknown module 'layer3'"),
        ({"skip": ["stem", "layer1.conv"]}, r"unknown module 'layer1.conv'; did you mean 'layer1.conv.'\?"),
        ({"only": "stem.0.weight"}, "unknown module 'stem.0.weight'"),  # a layer learns as a whole
        ({"only": "stem.2"}, "'stem.2' chooses nothing: it has no weights"),
        ({"only": 3}, "module names or patterns, not 3"),
        ({"skip": "*.out_proj"}, r"'\*.out_proj' chooses nothing: .* inside a layer converted as a whole"),
    ],
)
def test_names_that_choose_nothing_are_refused(options, message):
    with pytest.raises(evcl.EvclError, match=message):
        bayesianize(vit() if "*" in str(options) else resnet(), **options)


def test_tied_weights_are_taken_up_together():
    module = gpt()
    module.down.weight = nn.Parameter(torch.randn(8, 16))
    module.up = nn.Linear(8, 9, bias=False)
    module.up.weight = module.tokens.weight
    assert "up.weight" not in bayesianize(module).trunk_names
    with pytest.raises(evcl.EvclError, match=r"'tokens.weight' is tied to a weight of 'up': choose both"):
        bayesianize(module, skip="up")


def test_a_pretrained_network_can_be_the_first_priors_centre(generator):
    """Weights that the data says nothing about then stay; with the prior at 0 they are drawn there."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.ReLU())
    x, y = images(generator, 0)
    x[..., 2:4, :] = 0  # these pixels are never seen
    moved = {}
    for prior in ("zero", "network"):
        learner = evcl.VCL(module, epochs=20, prior=prior, lr=0.01)
        learner.learn((x, y))
        weight = learner.mean_network()[0][1].weight.view(5, 6, 6)
        moved[prior] = (weight - module[1].weight.view(5, 6, 6))[:, 2:4].abs().mean()
    assert moved["network"] == 0
    assert moved["zero"] > 0.01
    with pytest.raises(evcl.EvclError, match=r"prior must be 'zero', 'network' or an evcl\.nn\.Prior, not 'one'"):
        evcl.VCL(module, prior="one")


# --- examples that touch ---------------------------------------------------------------------------------------------


MIXTURES = {
    "centred on the batch": lambda m, h: h - h.mean(0),
    "normalised by the batch": lambda m, h: h / (1 + h.square().mean(0)),
    "attention over the batch": lambda m, h: m.attention(h[None], h[None], h[None])[0][0],
    "batch and features reshaped": lambda m, h: h.mT.reshape(h.shape),
    "the batch's largest": lambda m, h: h + h.max(0).values,
    "the one before": lambda m, h: h + h.roll(1, 0),
    "at the end": lambda m, h: h,
    "not": lambda m, h: h,
    "the batch is the second axis": lambda m, h: m.norm(torch.stack([h, -h])).sum(0),
}
HARMLESS = ("not", "the batch is the second axis")


def mixes(how):
    def run(m, x):
        out = m.out(MIXTURES[how](m, m.first(x)).tanh())
        return out + out.sum(0) if how == "at the end" else out

    layers = {"attention": nn.MultiheadAttention(4, 2, batch_first=True), "norm": nn.LayerNorm(4)}
    return Net(run, first=nn.Linear(4, 4), **layers, out=nn.Linear(4, 3))


@pytest.mark.parametrize("how", [how for how in MIXTURES if how not in HARMLESS])
def test_a_network_that_mixes_examples_is_refused(how, generator):
    x, y = torch.randn(12, 4, generator=generator), torch.arange(12) % 2
    message = "(mixes? the examples|are mixed before|the same number of rows).* Keep the batch as the first axis"

    def train(replicas):
        run = run_of(mixes(how), "vcl", range(replicas), epochs=1)
        run.learn([TaskData(x[None], y[None], run.add_head(3, 2))])

    with pytest.raises(evcl.EvclError, match=message):
        train(2)
    with pytest.raises(evcl.EvclError, match=message):  # its Fisher would be wrong
        evcl.EWC(mixes(how), epochs=1).learn((x, y))
    train(1)  # one network, no Fisher: torch's business


@pytest.mark.parametrize("how", HARMLESS)
def test_a_network_that_does_not_mix_is_not_refused(how, generator):
    evcl.EWC(mixes(how), epochs=1).learn((torch.randn(12, 4, generator=generator), torch.arange(12) % 2))


def repeats():
    return Net(lambda m, x: m.out(x + m.token.repeat(len(x), 1)), token=torch.zeros(1, 4), out=nn.Linear(4, 3))


def multiplies():
    """A parameter [1, ...] that is no token: one copy per example would be another network, without an error."""
    return Net(lambda m, x: m.out(x) * m.token.square().sum(), token=torch.randn(1, 4), out=nn.Linear(4, 3))


@pytest.mark.parametrize("make", [repeats, multiplies])
def test_a_token_that_is_not_expanded_is_used_directly(make, generator, tmp_path):
    x, y = torch.randn(6, 4, generator=generator), [0, 1] * 3
    module = make()
    learner = evcl.EWC(module, epochs=3)
    learner.learn((x, y))
    network = learner.state.run.network
    assert len(network.owned) == 0
    assert list(network.direct.names) == ["token"]
    assert (network.layout.views(learner.state.run.memory.importance)["token"] > 0).any()
    saved(learner, tmp_path, x, make())
    torch.testing.assert_close(learner.mean_network()(x).softmax(1), learner.predict_proba(x))


def unsqueezed():
    """What the batch shares is given an axis for it."""

    def run(m, x):
        return m.out(x.unsqueeze(2) + m.places(torch.arange(4)).unsqueeze(0)).mean(1)

    return Net(run, places=nn.Embedding(4, 5), out=nn.Linear(5, 3))


def test_what_a_batch_shares_may_be_used_in_any_way(generator, tmp_path):
    """If it is not merely added, the layer is a plain one, whose weights are drawn once per batch."""
    x, y = torch.randn(6, 4, generator=generator), [0, 1] * 3
    learner = evcl.EVCL(unsqueezed(), epochs=1)
    learner.learn((x, y))
    assert list(learner.state.run.network.direct.names) == ["places.weight"]
    saved(learner, tmp_path, x, unsqueezed())


def test_a_layer_taken_whole_turns_a_tensor_into_a_tensor(generator, registered):
    class Split(Net):
        def forward(self, x, scale=1.0):
            return (scale * x * self.gamma).split(2, 1)

    data = torch.randn(6, 4, generator=generator), [0, 1] * 3
    one, two = (
        Net(run, split=Split(None, gamma=torch.ones(4)))
        for run in (lambda m, x: m.split(x)[0], lambda m, x: m.split(x, 2.0)[0])
    )
    evcl.VCL(one, epochs=1).learn(data)  # as it is, it may take and return anything
    registered(Split)
    with pytest.raises(evcl.EvclError, match=r"'split' \(Split\) returns a tuple, not a tensor: do not register"):
        evcl.VCL(one).learn(data)
    with pytest.raises(evcl.EvclError, match=r"'split' \(Split\) is registered, so it takes one tensor"):
        evcl.VCL(two).learn(data)


def test_an_index_outside_the_table_is_explained(generator):
    x, y = sentences(generator, 0)
    learner = evcl.EVCL(gpt(), epochs=1)
    with pytest.raises(evcl.EvclError, match=r"'tokens' \(Embedding\) got an index outside its rows 0 to 8"):
        learner.learn((x + 6, y))


def uses_the_table():
    def run(m, x):
        return F.linear(m.inner(m.words(x)).mean(1), m.words.weight)

    return Net(run, words=nn.Embedding(9, 4), inner=nn.Linear(4, 4))


def test_a_weight_that_is_used_past_its_layer(generator, tmp_path):
    """The plain layer takes the place of the Bayesian one, and the weight is drawn once per batch."""
    x, y = torch.randint(9, (20, 3), generator=generator), [0, 1] * 10
    module = uses_the_table()
    learner = evcl.EVCL(module, epochs=2)
    learner.learn((x, y))
    network = learner.state.run.network
    assert list(network.direct.names) == ["words.weight"]
    assert [type(m).__name__ for m in (network.trunk.words, network.trunk.inner)] == ["Embedding", "Linear"]
    assert isinstance(network.trunk.words, nn.Embedding)
    saved(learner, tmp_path, x, uses_the_table())
    mean = learner.state.run.predict(x[None].float(), 0, [network.posterior.mean])[0]
    torch.testing.assert_close(learner.mean_network()(x).softmax(1), mean)


@pytest.mark.parametrize("method", ["naive", "evcl"])
def test_weights_used_past_layers_of_layers(method, generator):
    def run(m, x):
        h = m.reads(m.words(x))[0]
        h = m.attends(h, h, h)[0].mean(1)
        return F.linear(h, m.reads.weight_hh_l0) + F.linear(h, m.attends.in_proj_weight[:4]).repeat(1, 4)

    x, y = torch.randint(9, (20, 3), generator=generator), [0, 1] * 10
    of_layers = nn.LSTM(4, 4, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True)
    module = Net(run, words=nn.Embedding(9, 4), reads=of_layers[0], attends=of_layers[1])
    learner = evcl.Learner(module, method, epochs=20)
    learner.learn((x, y))
    network = learner.state.run.network
    assert [type(m) for m in (network.trunk.reads, network.trunk.attends)] == [nn.LSTM, nn.MultiheadAttention]
    assert "words.weight" not in network.direct.names
    plain = learner.mean_network()
    mean = learner.state.run.predict(x[None].float(), 0, [network.posterior.mean])[0]
    torch.testing.assert_close(plain(x).softmax(1), mean)
    assert not torch.equal(plain[0].reads.weight_ih_l0, module.reads.weight_ih_l0)  # used by the layer alone


def attends(m, x):
    return F.scaled_dot_product_attention(*[m.inner(x).view(-1, 1, 2, 2)] * 3, dropout_p=0.1).flatten(1)


@pytest.mark.parametrize(
    "run", [lambda m, x: F.dropout(m.inner(x)), attends, lambda m, x: m.inner(x) + torch.randn_like(x)]
)
def test_a_network_that_draws_from_torchs_generator_is_refused(run, generator):
    data = torch.randn(6, 4, generator=generator), [0, 1] * 3
    for method in ("naive", "evcl"):
        with pytest.raises(evcl.EvclError, match=r"torch's global generator.*use nn\.Dropout.*only if self\.training"):
            evcl.Learner(Net(run, inner=nn.Linear(4, 4)), method).learn(data)
    asks = Net(lambda m, x: F.dropout(m.inner(x), training=m.training), inner=nn.Linear(4, 4))
    evcl.EVCL(asks, epochs=1).learn(data)


def words():
    """Tokens, positions, attention and a norm."""
    block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    parts = {"embed": nn.Embedding(20, 16), "position": torch.zeros(1, 6, 16), "block": block}
    return Net(lambda m, x: m.block(m.embed(x) + m.position).mean(1), **parts)


def reads():
    """A recurrent layer, a cell, and a matrix that the network's own code uses."""
    parts = {"layer": nn.LSTM(4, 16, batch_first=True, bidirectional=True), "cell": nn.GRUCell(32, 16)}
    return Net(lambda m, x: m.cell(m.layer(x)[0].mean(1)) @ m.matrix, **parts, matrix=torch.randn(16, 16) / 4)


NETWORKS = {
    "perceptron": (lambda: evcl.nn.mlp(6, [20, 20]), lambda g: torch.randn(300, 6, generator=g)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(),
            nn.Flatten(), nn.Linear(8 * 4, 16), nn.ReLU(),
        ),
        lambda g: torch.randn(300, 1, 6, 6, generator=g).add_(torch.randn(300, 1, 1, 1, generator=g)),
    ),
    "recurrent": (reads, lambda g: torch.randn(300, 5, 4, generator=g)),
    "transformer": (words, lambda g: torch.randint(20, (300, 6), generator=g)),
}  # fmt: skip


def seeded(make):
    """A network whose initial weights are always the same."""
    torch.manual_seed(0)
    return make()


@pytest.mark.full
@pytest.mark.parametrize("method", ["evcl", "naive"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_learner_in_bf16_learns_as_one_in_float32_and_keeps_float32(name, method, generator, tmp_path):
    make, inputs = NETWORKS[name]
    x = inputs(generator)
    y = (x.double().flatten(1).sum(1) > x.double().flatten(1).sum(1).median()).long()
    accuracy, weights = {}, {}
    for precision in ("fp32", "bf16"):
        learner = evcl.Learner(seeded(make), method, precision=precision, epochs=30)
        learner.learn((x, y), classes=[0, 1])
        accuracy[precision] = float((torch.as_tensor(learner.predict(x, task="0")) == y).double().mean())
        learner.learn((x, 1 - y), epochs=1)
        weights[precision] = learner.state.run.network.posterior.mean
    assert weights["bf16"].dtype == torch.float32
    assert not torch.equal(weights["bf16"], weights["fp32"])
    assert accuracy["fp32"] > 0.8
    assert abs(accuracy["bf16"] - accuracy["fp32"]) < 0.06
    again = saved(learner, tmp_path, x, None if name == "perceptron" else seeded(make), "0")
    assert again.state.run.precision == "bf16"


def test_an_unknown_precision_is_refused():
    with pytest.raises(evcl.EvclError, match="precision must be fp32, tf32 or bf16, not 'fp16'"):
        evcl.EVCL(evcl.nn.mlp(2, [2]), precision="fp16")


SOURCE = torch.Generator().manual_seed(0)


def made(replicas=1):
    module = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Tanh())
    network = bayesianize(module, init_std=None, replicas=replicas, dtype=torch.float64)
    k = network.add_head()
    layout = network.with_slots([head(k, 3, 96)])
    mean = 0.3 * torch.randn(replicas, layout.size, generator=SOURCE, dtype=torch.float64)
    x = torch.randn(replicas, 20, 2, 8, 8, generator=SOURCE, dtype=torch.float64)
    y = torch.randint(3, (replicas, 20), generator=SOURCE)
    return network, layout, mean, x, y


def test_only_what_grows_with_the_examples_counts():
    weight = torch.randn(50, 4, generator=SOURCE)

    def run(x):  # [n, 4] -> [n, 50], [n, 50], and 200 numbers that do not depend on n; views cost nothing
        return ((x @ (2 * weight).T).tanh()).view(-1)

    assert measured(run, torch.zeros(1, 4)) == Size(50, 100)


def rows_of(network, run):
    """The largest number of examples in a pass through the network, and what `run` returns."""
    seen = []
    handle = network.trunk[0].register_forward_hook(lambda layer, args, out: seen.append(len(args[0])))
    found = run()
    handle.remove()
    return max(seen), found


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("kind", ["exact", "empirical"])
def test_the_fisher_in_small_passes_is_the_same(monkeypatch, kind, replicas):
    network, layout, mean, x, y = made(replicas)
    sample = Sample(network, mean, layout, [0], x, y)
    most, wanted = rows_of(network, lambda: fisher(sample, kind))
    factors = kfac(sample, kind).factors
    assert most == 20 * replicas
    size = network.size(x, lambda _: None, "fisher False")
    monkeypatch.setattr("evcl.nn.sizes.KEPT_NUMBERS", 7 * size.total)
    most, found = rows_of(network, lambda: fisher(sample, kind))
    assert most == 7 // replicas * replicas
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(kfac(sample, kind).factors, factors)


def test_the_fisher_holds_no_more_than_its_bound(monkeypatch):
    """What autograd keeps of a pass is counted."""
    network, layout, mean, x, y = made()
    fisher(Sample(network, mean, layout, [0], x, y))
    total = network.size(x, lambda _: None, "fisher False").total
    numbers = {}
    for rows in (2, 10):
        monkeypatch.setattr("evcl.nn.sizes.KEPT_NUMBERS", rows * total)
        held: list[int] = []

        def pack(tensor, held=held):
            held.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            fisher(Sample(network, mean, layout, [0], x[:, :rows], y[:, :rows]), "empirical")
        numbers[rows] = sum(held)
        assert numbers[rows] <= rows * total + 3 * layout.size
    assert numbers[10] > 2 * numbers[2]


@pytest.mark.parametrize("replicas", [1, 3])
def test_predictions_in_small_passes_are_the_same(monkeypatch, replicas):
    network, layout, mean, x, _ = made(replicas)
    most, wanted = rows_of(network, lambda: outputs(network, mean, layout, x, [0]))
    assert most == 20 * replicas
    monkeypatch.setattr("evcl.nn.sizes.PASS_NUMBERS", 6 * 64 * 4)  # four times the output of the convolution
    most, found = rows_of(network, lambda: outputs(network, mean, layout, x, [0]))
    assert most <= 4
    torch.testing.assert_close(found, wanted)


def test_a_network_that_needs_more_examples_has_no_size():
    class Pairs(nn.Module):
        def forward(self, x):
            if len(x) < 3:
                raise RuntimeError("too few")
            return x.flatten(1)

    network = bayesianize(nn.Sequential(nn.Conv1d(1, 2, 1), Pairs()), init_std=None)
    x = torch.zeros(1, 9, 1, 4)
    assert outputs(network, network.posterior.mean, network.layout, x, []).shape == (1, 9, 8)
