"""Pretrained networks; their low-rank adapters: what is trained, what the terms act on, tasks, files, PEFT."""

from __future__ import annotations

import copy
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import Net, saved
from torch import nn

import evcl
from evcl import data
from evcl.nn import Bert, EfficientNetLite0, LoRA, bayesianize
from evcl.nn.bert import BertTop, below
from evcl.nn.lora import AdaptedAttention, AdaptedLinear, BayesianUp, adapted, base_hash, with_adapters

pytestmark = pytest.mark.usefixtures("torch_draws")
NAMES = [f"encoder.layer.{k}.attention.self.{name}.up.weight" for k in range(2) for name in ("query", "value")]


def bert(seed=0):
    torch.manual_seed(seed)
    return Bert(vocabulary=40, width=16, layers=2, heads=2, inner=32, positions=16)


def texts(rows=48, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(1, 40, (rows, 10), generator=g).float()
    x[:, 6:] *= (torch.rand(rows, 1, generator=g) > 0.5).float()
    return x, (x[:, 1] > 20).long()


def transformer(batch_first):
    """torch's own, whose projections are one fused weight."""

    def run(m, x):
        h = m.embed(x.long())
        return m.encoder(h if batch_first else h.transpose(0, 1)).mean(1 if batch_first else 0)

    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=batch_first)
    return Net(run, embed=nn.Embedding(40, 16), encoder=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def strong(network, lora, value=0.1):
    """The network with adapters that are not 0."""
    made = lora(network)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in made.parameters():
            if p.requires_grad:
                p.normal_(0, value)
    return made


def test_at_first_the_network_computes_what_it_did_and_only_the_adapters_can_learn():
    network, x = bert(), texts()[0]
    made = LoRA(rank=2)(network)
    assert torch.equal(made(x), network(x))
    assert [name for name, p in made.named_parameters() if p.requires_grad] == NAMES
    assert all(p.requires_grad for p in network.parameters())  # the user's own is unchanged
    assert bayesianize(made).trunk_names == tuple(NAMES)


def test_an_adapter_adds_alpha_over_rank_times_b_a():
    network, lora = bert(), LoRA(rank=3, alpha=12.0)
    made = strong(network, lora)
    layer = made.get_submodule("encoder.layer.1.attention.self.value")
    assert isinstance(layer, AdaptedLinear)
    plain = copy.deepcopy(network)
    for path, one in adapted(made):
        plain.get_submodule(path).weight.data += 4.0 * one.up.weight.detach() @ one.down
    x = texts()[0]
    torch.testing.assert_close(made(x), plain(x))
    torch.testing.assert_close(layer.down @ layer.down.T, torch.eye(3))  # orthonormal rows


@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_fused_projections_have_adapters_of_queries_and_values(batch_first):
    network, x = transformer(batch_first).eval(), texts()[0]
    made = strong(network, LoRA(rank=2)).eval()
    plain = copy.deepcopy(network)
    for path, layer in adapted(made):
        assert isinstance(layer, AdaptedAttention)
        weight = plain.get_submodule(path).in_proj_weight.data
        for name, rows in (("query", slice(0, 16)), ("value", slice(32, 48))):
            weight[rows] += 2.0 * layer.up[name].weight.detach() @ layer.get_buffer(f"down_{name}")
    torch.testing.assert_close(made(x), plain(x))
    learner = evcl.EVCL(network, adapters=LoRA(rank=2), epochs=2)
    learner.learn(texts())
    learner.learn(texts(seed=1))
    assert all("self_attn.up." in name for name in learner.state.run.network.trunk_names)
    mean = learner.mean_network(0)(x)
    assert mean.shape == (48, 2)


def test_targets():
    def found(targets, network=None):
        return [path for path, _ in adapted(LoRA(rank=2, targets=targets)(network or bert()))]

    assert found("encoder.layer.1.*") == [
        f"encoder.layer.1.{name}"
        for name in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
                     "intermediate.dense", "output.dense")
    ]  # fmt: skip
    assert found(["key"]) == [f"encoder.layer.{k}.attention.self.key" for k in range(2)]
    assert found(None, evcl.nn.mlp(4, [3, 3])) == ["1", "3"]  # without attention, every linear layer
    with pytest.raises(evcl.EvclError, match="unknown linear layer"):
        found("encoder.layer.0.attention.self.quary")
    with pytest.raises(evcl.EvclError, match="no linear layer"):
        found(None, nn.Conv2d(1, 1, 1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, "rank must be"),
        ({"alpha": 0}, "alpha must be"),
        ({"tasks": "all"}, "tasks must be 'shared', 'each' or 'merged'"),
        ({"targets": 3}, "targets takes names"),
        ({"rank": 17}, "rank 17 is more than the 16 inputs"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(evcl.EvclError, match=words):
        LoRA(**options)(bert())


def test_adapters_must_be_a_lora_and_only_once():
    with pytest.raises(evcl.EvclError, match=r"adapters must be an evcl\.nn\.LoRA"):
        evcl.EVCL(bert(), adapters=8)
    with pytest.raises(evcl.EvclError, match="has adapters already"):
        LoRA(rank=2)(LoRA(rank=2)(bert()))


def test_the_fisher_of_b_is_that_of_the_weight_seen_from_the_rows_of_a():
    """sum over examples of (alpha/r dL/dW A^T)^2, with dL/dW of the whole weight by autograd."""
    from evcl.curvature import Sample, fisher

    made = strong(bert(), LoRA(rank=2)).double()
    x, y = texts(6)
    learner_network = bayesianize(made, init_std=None, dtype=torch.float64)
    learner_network.add_head()
    layout = learner_network.with_slots([evcl.nn.head(0, 2, 16)])
    torch.manual_seed(3)
    head = torch.randn(1, 34, dtype=torch.float64)
    mean = torch.cat([learner_network.posterior.mean, head], 1)
    learner_network.layout = layout
    found = fisher(Sample(learner_network, mean, layout, [0], x.double()[None], y[None]), "empirical")
    total = torch.zeros(16, 2, dtype=torch.float64)
    path = "encoder.layer.0.attention.self.value"
    for row, label in zip(x.double(), y, strict=True):
        plain = copy.deepcopy(made)
        layer = plain.get_submodule(path)
        weight = layer.base.weight.requires_grad_()
        logits = plain(row[None]) @ head[0, :32].view(2, 16).T + head[0, 32:]
        (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(logits, label[None]), weight)
        total += (2.0 * gradient @ layer.down.T).square()
    torch.testing.assert_close(layout.view(found, f"{path}.up.weight")[0], total / 6)


def test_the_elastic_penalty_holds_the_product():
    """Two strengths give two results, and the stronger one moves the product less."""
    moved = {}
    for strength in (0.0, 100.0):
        learner = evcl.Learner(bert(), "ewc", adapters=LoRA(rank=2), strength=strength, epochs=10, lr=0.02, distill=0.0)
        learner.learn(texts())
        before = learner.state.run.network.posterior.mean[:, : 4 * 32].clone()
        x, y = texts(seed=1)
        learner.learn(x, 1 - y)
        moved[strength] = float((learner.state.run.network.posterior.mean[:, : 4 * 32] - before).norm())
    assert moved[100.0] < 0.7 * moved[0.0]


def test_the_base_model_never_changes_and_the_first_prior_fits_it():
    network = bert()
    learner = evcl.EVCL(network, adapters=LoRA(rank=2), epochs=3)
    trunk = {name: t.clone() for name, t in learner.state.run.network.trunk.state_dict().items()}
    learner.learn(texts())
    assert all(torch.equal(t, trunk[name]) for name, t in learner.state.run.network.trunk.state_dict().items())
    for layer in learner.state.run.network.bayesian_layers():
        if isinstance(layer, BayesianUp):
            weight = network.get_submodule(layer.path.removesuffix(".up")).weight
            # D x, for x without a preferred direction, is as large as W0 x
            assert 2.0**2 * layer.width**2 * 2 == pytest.approx(float(weight.detach().square().mean()) * 16)


@pytest.mark.full
@pytest.mark.parametrize("method", ["evcl", "vcl", "ewc", "si", "naive", "er"])
@pytest.mark.parametrize("tasks", ["shared", "each", "merged"])
def test_a_saved_learner_predicts_and_goes_on_as_before(method, tasks, tmp_path):
    network, (x, y) = bert(), texts()
    learner = evcl.Learner(network, method, adapters=LoRA(rank=2, tasks=tasks), epochs=3, lr=0.02)
    learner.learn(x, y)
    learner.learn(x, 1 - y)
    loaded = saved(learner, tmp_path, x, network, task=0)
    assert torch.equal(loaded.predict_proba(x, task=1), learner.predict_proba(x, task=1))
    for one in (learner, loaded):
        one.learn(x, (x[:, 0] > 20).long())
    assert torch.equal(loaded.predict_proba(x, task=2), learner.predict_proba(x, task=2))


def test_the_file_has_the_adapters_but_not_the_base_model_which_must_be_the_same(tmp_path):
    path, network = tmp_path / "model.safetensors", bert()
    learner = evcl.Naive(network, adapters=LoRA(rank=2), epochs=1)
    learner.learn(texts())
    learner.save(path)
    assert path.stat().st_size < 8_000 < 4 * sum(p.numel() for p in network.parameters())
    with pytest.raises(evcl.EvclError, match="its adapters belong to another base model") as error:
        evcl.load(path, network=bert(1))
    assert "\n" not in str(error.value)
    with pytest.raises(evcl.EvclError, match="pass it as load"):
        evcl.load(path)
    assert base_hash(network, None) == base_hash(copy.deepcopy(network), None) != base_hash(bert(1), None)


def test_an_mlp_with_adapters_needs_its_network_to_load(tmp_path):
    network = evcl.nn.mlp(4, [8])
    learner = evcl.EVCL(network, adapters=LoRA(rank=2), epochs=1)
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    learner.learn(x, (x[:, 0] > 0).long())
    saved(learner, tmp_path, x, network)


def test_with_one_adapter_per_task_nothing_is_forgotten_and_heads_are_not_shared():
    x, y = texts()
    learner = evcl.EVCL(bert(), adapters=LoRA(rank=2, tasks="each"), epochs=5, lr=0.02)
    learner.learn(x, y)
    before = learner.predict_proba(x, task=0)
    learner.learn(x, 1 - y)
    assert torch.equal(learner.predict_proba(x, task=0), before)
    with pytest.raises(evcl.EvclError, match="every task needs a head of its own"):
        learner.learn(x, y, head=0)
    assert torch.equal(learner.predict_proba(x, task=0), before)


def test_merging_changes_no_prediction_and_the_next_adapter_reads_other_inputs():
    x, y = texts()
    learner = evcl.Naive(bert(), adapters=LoRA(rank=2, tasks="merged"), epochs=5, lr=0.02)
    plain = evcl.Naive(bert(), adapters=LoRA(rank=2), epochs=5, lr=0.02)
    first = [layer.down.clone() for _, layer in adapted(learner.state.run.network.trunk)]
    for one in (learner, plain):
        one.learn(x, y)
    torch.testing.assert_close(learner.predict_proba(x), plain.predict_proba(x))
    network = learner.state.run.network
    assert all(not network.layout.view(network.posterior.mean, name).any() for name in network.adapters)
    assert all(not torch.equal(a, b.down) for a, (_, b) in zip(first, adapted(network.trunk), strict=True))
    torch.testing.assert_close(learner.mean_network(0)(x).softmax(1), learner.predict_proba(x))


@pytest.mark.parametrize(
    ("method", "given", "why"),
    [
        ("progress-compress", {}, "trains another network"),
        ("progressive", {}, "trains another network"),
        ("kfac-ewc", {}, "remembers the factors of layers"),
        ("noisy-kfac", {}, "remembers the factors of layers"),
        ("evcl", {"importance": "kfac"}, "remembers the factors of layers"),
        ("ewc", {"importance": "kfac"}, "remembers the factors of layers"),
        ("evcl-er", {"importance": "kfac"}, "remembers the factors of layers"),
    ],
)
@pytest.mark.parametrize("tasks", ["each", "merged"])
def test_methods_whose_memory_cannot_start_anew_share_their_adapters(method, given, why, tasks):
    with pytest.raises(evcl.EvclError, match=f"{why}.*: with it, adapters must be shared, not '{tasks}'"):
        evcl.Learner(bert(), method, adapters=LoRA(rank=2, tasks=tasks), **given)


def test_a_failed_round_leaves_the_learner_as_it_was():
    x, y = texts()
    learner = evcl.EVCL(bert(), adapters=LoRA(rank=2, tasks="each"), epochs=3)
    learner.learn(x, y)
    before = learner.predict_proba(x, task=0)

    class Stop(evcl.Callback):
        def end_epoch(self, epoch):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        learner.learn(x, 1 - y, callbacks=[Stop()])
    assert torch.equal(learner.predict_proba(x, task=0), before)


def test_new_classes_are_told_apart_by_the_features_of_the_base_model():
    """One class per task: no softmax can learn that, but the base model's features never change."""
    torch.manual_seed(0)
    x = torch.cat([torch.randint(1 + 13 * c, 14 + 13 * c, (30, 10)).float() for c in range(3)])
    y = torch.arange(3).repeat_interleave(30)
    learner = evcl.EVCL(bert(), adapters=LoRA(rank=2), epochs=2)
    for c in range(3):
        learner.learn(x[y == c], y[y == c], **({"classes": [0, 1, 2]} if c == 0 else {"head": 0}))
    assert learner.measure((x, y)).accuracy > 0.95


# --- PEFT -------------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer as PEFT makes it."""

    def __init__(self, base, merged=False):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})
        self.scaling, self.active_adapters = {"default": 2.0}, ["default"]
        self.merged, self.fan_in_fan_out = merged, False

    def forward(self, x):
        x = x.to(self.lora_A["default"].weight.dtype)  # as PEFT does: a Bayesian layer has no such weight
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * self.scaling["default"]


Layer.__module__ = "peft.tuners.lora.layer"


def of_peft(**options):
    network = bert().requires_grad_(False)
    for layer in network.encoder.layer:
        layer.attention.self.query = Layer(layer.attention.self.query, **options)
    return network


def test_a_peft_model_is_used_as_it_is(tmp_path):
    network, (x, y) = of_peft(), texts()
    torch.testing.assert_close(with_adapters(network, None)(x), network(x))
    before = torch.get_rng_state()
    learner = evcl.EVCL(network, epochs=3)
    assert torch.equal(torch.get_rng_state(), before)  # only the networks of these tests may draw from it
    assert learner.state.run.network.trunk_names == tuple(
        f"encoder.layer.{k}.attention.self.query.{part}.weight" for k in range(2) for part in ("down", "up")
    )
    learner.learn(x, y)
    learner.learn(x, 1 - y)
    assert not any("word" in name for name in learner.described()[1])
    saved(learner, tmp_path, x, network, task=0)
    with pytest.raises(evcl.EvclError, match="one active LoRA adapter that is not merged"):
        evcl.EVCL(of_peft(merged=True))


def test_the_real_peft():
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    assert isinstance(sys.modules["peft"], types.ModuleType)
    network, (x, y) = bert(), texts()
    model = peft.get_peft_model(network, peft.LoraConfig(r=2, target_modules=["query", "value"]))
    torch.testing.assert_close(with_adapters(model, None)(x), model.eval()(x))
    learner = evcl.EVCL(model, epochs=2)
    learner.learn(x, y)
    assert len(learner.state.run.network.trunk_names) == 8


# --- layers of lower rank ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["evcl", "naive"])
def test_truncation_is_the_best_approximation_of_that_rank_and_leaves_the_learner_alone(method):
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    learner = evcl.Learner(evcl.nn.mlp(6, [8, 8]), method, epochs=5)
    learner.learn(x, y)
    before = learner.predict_proba(x)
    made = evcl.nn.truncate(learner, "3", 3)
    layout = learner.state.run.network.layout
    weight, low = (layout.view(one.state.run.network.posterior.mean, "3.weight")[0] for one in (learner, made))
    u, s, vh = torch.linalg.svd(weight)
    torch.testing.assert_close(low, (u[:, :3] * s[:3]) @ vh[:3])
    assert torch.equal(learner.predict_proba(x), before)
    assert not torch.equal(made.predict_proba(x), before)
    torch.testing.assert_close(made.mean_network(0)[0][3].weight, low)
    made.learn(x, 1 - y)  # it goes on from there
    assert torch.equal(learner.predict_proba(x), before)
    assert torch.equal(evcl.nn.truncate(learner, "3", 8).predict_proba(x).argmax(1), before.argmax(1))


def test_a_frozen_layer_can_be_truncated_too():
    learner = evcl.EVCL(bert(), adapters=LoRA(rank=2), epochs=1)
    learner.learn(texts())
    made = evcl.nn.truncate(learner, "encoder.layer.1.output.dense", 0.25)
    for trunk in (made.state.run.network.trunk, made.state.plain):
        assert int(torch.linalg.matrix_rank(trunk.get_parameter("encoder.layer.1.output.dense.weight"))) == 4
    assert int(torch.linalg.matrix_rank(learner.state.plain.get_parameter("encoder.layer.1.output.dense.weight"))) == 16


def test_wrong_truncations_are_refused():
    learner = evcl.Naive(evcl.nn.mlp(6, [8, 8]), epochs=1)
    with pytest.raises(evcl.EvclError, match="unknown layer '7'"):
        evcl.nn.truncate(learner, "7", 2)
    for rank in (0, 9, 1.5, True, "2"):
        with pytest.raises(evcl.EvclError, match="rank must be from 1 to 8"):
            evcl.nn.truncate(learner, "3", rank)


def test_padding_changes_nothing_and_an_empty_text_is_finite():
    network = bert()
    x = torch.randint(1, 40, (5, 6)).float()
    torch.testing.assert_close(network(F.pad(x, (0, 4))), network(x))
    torch.testing.assert_close(network(x).norm(dim=1), torch.full((5,), 4.0))
    assert network(torch.zeros(2, 6)).isfinite().all()
    with pytest.raises(evcl.EvclError, match="a length of up to 16"):
        network(torch.ones(1, 17))
    with pytest.raises(evcl.EvclError, match="multiple of heads"):
        Bert(width=10, heads=3)


def test_the_layers_above_continue_where_those_below_end():
    network = bert()
    x = torch.randint(1, 40, (5, 6)).float()
    x[:2, 4:] = 0
    for first in range(3):
        torch.testing.assert_close(BertTop(network, first)(below(network, first, x)), network(x))


def test_all_of_it_can_be_bayesian():
    x = torch.randint(1, 40, (24, 6)).float()
    learner = evcl.EVCL(bert(), epochs=2)
    learner.learn(x, (x[:, 0] > 20).long())
    learner.learn(x, (x[:, 1] > 20).long())
    assert len(learner.state.run.network.trunk_names) == len(list(bert().parameters()))
    assert learner.predict_proba(x, task=0).shape == (24, 2)


def test_efficientnet_takes_images_of_any_size_and_can_be_bayesian():
    network = EfficientNetLite0().eval()
    for size in (32, 45):
        assert network(torch.randn(2, 3, size, size)).shape == (2, 1280)
    assert EfficientNetLite0(classes=True).eval()(torch.randn(1, 3, 32, 32)).shape == (1, 1000)
    assert sum(p.numel() for p in EfficientNetLite0(classes=True).parameters()) == 4_652_008


def _only_if_fetched(name, monkeypatch):
    """Use the user's own cache."""
    monkeypatch.delenv("EVCL_CACHE")
    here = data.status(name)
    if not here.fetched or here.problem:
        pytest.skip(f"{name} was not fetched: evcl data fetch {name}")


def test_minilm_finds_the_published_similarities(monkeypatch):
    """Those of the model's page: 0.695, 0.943 and 0.257."""
    _only_if_fetched("minilm", monkeypatch)
    sentences = ["That is a happy person", "That is a happy dog", "That is a very happy person", "Today is a sunny day"]
    with torch.no_grad():
        v = F.normalize(evcl.nn.minilm()(evcl.nn.minilm_tokeniser()(sentences, 16)), dim=1)
    assert (v[1:] @ v[0]).tolist() == pytest.approx([0.695, 0.943, 0.257], abs=1e-3)


def test_efficientnet_knows_a_palace_and_a_flower(monkeypatch):
    _only_if_fetched("efficientnet-lite0", monkeypatch)
    from PIL import Image
    from sklearn.datasets import load_sample_images

    network = evcl.nn.efficientnet_lite0(classes=True)
    for image, label in zip(load_sample_images().images, (698, 985), strict=True):  # palace, daisy
        small = Image.fromarray(image).crop((106, 0, 533, 427)).resize((224, 224), Image.Resampling.BICUBIC)
        x = torch.from_numpy(np.asarray(small).copy()).permute(2, 0, 1)[None].float()
        with torch.no_grad():
            assert int(network((x - 127) / 128).argmax()) == label
