"""Exported networks predict what the learner predicts: programs of torch.export, and ONNX files."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import evcl
from evcl.learner.packing import pack

FIELDS = ("probabilities", "entropy", "aleatoric", "epistemic", "unfamiliar")
SMALL = {"epochs": 2, "predict_samples": 3, "fisher_examples": 10, "seed": 1}
KINDS = [pytest.param("pt2", id="pt2"), pytest.param("onnx", id="onnx")]


@pytest.fixture(autouse=True)
def _torch_may_draw_its_own_weights():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


class Images(nn.Module):
    """Convolutions with batch norms, and a skip; `len(x)` as people write it."""

    def __init__(self):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        x = torch.relu(self.norm1(self.first(x)))
        x = torch.relu(x + self.norm2(self.second(x)))
        return x.mean(3).reshape(len(x), -1)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.reads = nn.Embedding(20, 6), nn.LSTM(6, 6, batch_first=True, bidirectional=True)

    def forward(self, x):
        _, (h, _) = self.reads(self.words(x))
        return torch.cat([h[-2], h[-1]], 1)


class Text(nn.Module):
    """A small BERT with two inputs."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(20, 8, padding_idx=0), nn.Embedding(12, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, input_ids, attention_mask=None):
        h = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        h = self.encoder(h, src_key_padding_mask=attention_mask == 0)
        there = attention_mask.unsqueeze(2).to(h.dtype)
        return (h * there).sum(1) / there.sum(1)


def rows(n=24, columns=5, seed=0):
    x = torch.randn(n, columns, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long()


def images(n=24):
    x = torch.randn(n, 1, 8, 8)
    return x, torch.arange(n) % 2


def tokens(n=24, length=6):
    return torch.randint(1, 20, (n, length)), torch.arange(n) % 2


def sentences(n=24):
    x = [torch.randint(1, 20, (3 + i % 4,)).tolist() for i in range(n)]
    longest = max(map(len, x))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in x])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}, torch.arange(n) % 2


def opened(path, names=("x",)):
    """A function from inputs to outputs by name."""
    if path.suffix == ".pt2":
        return torch.export.load(path).module()
    runtime = pytest.importorskip("onnxruntime", reason="needs the package onnxruntime")
    session = runtime.InferenceSession(str(path))
    wanted = [one.name for one in session.get_inputs()]
    outputs = [one.name for one in session.get_outputs()]
    assert wanted == list(names)

    def run(*inputs):
        found = session.run(None, {name: x.numpy() for name, x in zip(wanted, inputs, strict=True)})
        return {name: torch.from_numpy(array) for name, array in zip(outputs, found, strict=True)}

    return run


def exported(learner, path, *options, **more):
    if path.suffix == ".onnx":
        pytest.importorskip("onnxscript", reason="needs the package onnxscript")
    learner.export(path, *options, **more)
    return path


def agree(found, wanted, fields=FIELDS):
    for name in fields:
        if getattr(wanted, name) is not None:
            torch.testing.assert_close(found[name], torch.as_tensor(getattr(wanted, name)), rtol=1e-4, atol=5e-5)
    assert set(found) == {name for name in fields if getattr(wanted, name) is not None}


# --- the predictive --------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("film", [False, True])
def test_groups_of_classes_films_and_any_number_of_rows(kind, film, tmp_path):
    """FiLM is multiplied into each draw."""
    x, y = rows()
    learner = evcl.EVCL(evcl.nn.mlp(5, [8]), film=film, **SMALL)
    learner.learn((x, y), "first")
    learner.learn((x + 3, y + 2), "second", **({} if film else {"head": "first"}))
    assert len(learner.state.session.groups["first"]) == 1 + (not film)
    for task in ("first", "second"):
        run = opened(exported(learner, tmp_path / f"model.{kind}", task=task))
        for some in (x[:1], x, torch.cat([x, x + 3])):
            agree(run(some), learner.predictions(some, task))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [Images, Words, Text])
def test_networks(make, kind, tmp_path):
    data = {Images: images, Words: tokens, Text: sentences}[make]
    learner = evcl.EVCL(make(), **SMALL)
    (x, y), (other, z) = data(), data()
    learner.learn((x, y), "first")
    learner.learn((other, z), "second")
    path = exported(learner, tmp_path / f"model.{kind}", task="second")
    if make is Text:
        run = opened(path, ("input_ids", "attention_mask"))
        agree(run(*other.values()), learner.predictions(other, "second"))
        short = {name: tensor[:3, :3] for name, tensor in other.items()}  # another length
        agree(run(*short.values()), learner.predictions(short, "second"))
    else:
        run = opened(path)
        agree(run(other), learner.predictions(other, "second"))
        agree(run(other[:1]), learner.predictions(other[:1], "second"))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_and_their_base_model_once(kind, tmp_path):
    network = evcl.nn.Bert(vocabulary=2000, width=16, layers=1, heads=2, inner=32, positions=12)
    x, y = torch.randint(1, 50, (24, 12)), torch.arange(24) % 2
    learner = evcl.EVCL(network, adapters=evcl.nn.LoRA(rank=2), **SMALL)
    learner.learn((x, y), "first")
    learner.learn((x, y + 2), "second", head="first")  # told apart by the features of the base model
    path = exported(learner, tmp_path / f"model.{kind}", task="first")
    agree(opened(path)(x.float()), learner.predictions(x, "first"))
    base = sum(p.numel() * 4 for p in network.parameters())
    assert path.stat().st_size < 2 * base + 700_000  # not once for each of the three draws


@pytest.mark.parametrize("method", ["ewc", "generative-classifier"])
def test_methods_without_draws(method, tmp_path):
    x, y = rows()
    learner = evcl.Learner(evcl.nn.mlp(5, [8]), method, epochs=2)
    learner.learn((x, y))
    found = opened(exported(learner, tmp_path / "model.pt2"))(x)
    agree(found, learner.predictions(x))
    assert float(found["epistemic"].abs().max()) < 1e-6


@pytest.mark.full
def test_fewer_draws_are_the_first_of_them(tmp_path):
    x, y = rows()
    learner, few = (evcl.EVCL(evcl.nn.mlp(5, [8]), **{**SMALL, "predict_samples": n}) for n in (6, 2))
    for one in (learner, few):
        one.learn((x, y))
    whole, part = tmp_path / "whole.pt2", tmp_path / "part.pt2"
    learner.export(whole)
    learner.export(part, samples=2)
    found = opened(part)(x)
    del found["unfamiliar"]  # it depends on how uncertain predictions were in training
    agree(found, few.predictions(x), FIELDS[:4])
    assert part.stat().st_size < whole.stat().st_size


# --- the mean network, the file --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_network(kind, tmp_path):
    x, y = rows()
    learner = evcl.EVCL(evcl.nn.mlp(5, [8]), **SMALL)
    learner.learn((x, y), "first")
    found = opened(exported(learner, tmp_path / f"mean.{kind}", what="mean"))(x)
    assert list(found) == ["logits"]
    if kind == "onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(str(tmp_path / "mean.onnx"))
        assert json.loads(session.get_modelmeta().custom_metadata_map["evcl.classes"]) == [0, 1]
        assert session.get_inputs()[0].shape == ["batch", 5]
    torch.testing.assert_close(found["logits"], learner.mean_network()(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_the_file_names_the_classes_and_needs_no_evcl(tmp_path):
    x, y = rows()
    learner = evcl.EVCL(evcl.nn.mlp(5, [8]), **SMALL)
    learner.learn((x, np.array(["no", "yes"])[y]), "first")
    learner.save(tmp_path / "model.safetensors")
    evcl.load(tmp_path / "model.safetensors").export(tmp_path / "model.pt2")  # a loaded learner knows its inputs
    texts = {"evcl.json": ""}
    torch.export.load(tmp_path / "model.pt2", extra_files=texts)
    about = json.loads(texts["evcl.json"])
    assert json.loads(about["evcl.classes"]) == ["no", "yes"]
    assert (about["evcl.task"], about["evcl.samples"], about["evcl.what"]) == ("first", "3", "predictive")
    torch.save(x, tmp_path / "x.pt")
    program = """
import sys, torch
sys.modules["evcl"] = None
found = torch.export.load(sys.argv[1]).module()(torch.load(sys.argv[2]))
print(found["probabilities"].tolist())
"""
    command = [sys.executable, "-c", program, str(tmp_path / "model.pt2"), str(tmp_path / "x.pt")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert np.array(json.loads(out)) == pytest.approx(learner.predict_proba(x).numpy(), abs=1e-5)


def test_what_cannot_be_exported_says_so(tmp_path):
    learner = evcl.EVCL(evcl.nn.mlp(5, [8]), **SMALL)
    path = tmp_path / "model.pt2"
    with pytest.raises(evcl.EvclError, match="nothing has been learned"):
        learner.export(path)
    learner.learn(rows(), "first")
    learner.learn(rows(), "second")
    for options, message in (
        ({}, "2 heads: choose a task"),
        ({"task": "third"}, "unknown task"),
        ({"task": 0, "what": "median"}, "what must be 'predictive' or 'mean'"),
        ({"task": 0, "samples": 0}, "samples"),
    ):
        with pytest.raises(evcl.EvclError, match=message):
            learner.export(path, **options)
    with pytest.raises(evcl.EvclError, match=r"should end in \.onnx or \.pt2"):
        learner.export(tmp_path / "model.pb", task=0)
    with pytest.raises(evcl.EvclError, match="cannot write"):
        learner.export(tmp_path / "nowhere" / "model.pt2", task=0)
    assert not path.exists()


@pytest.mark.full
def test_a_network_that_looks_at_the_values_of_its_inputs_is_refused(tmp_path):
    class Packed(Words):
        def forward(self, x):
            packed = nn.utils.rnn.pack_padded_sequence(
                self.words(x), (x != 0).sum(1).cpu(), batch_first=True, enforce_sorted=False
            )
            _, (h, _) = self.reads(packed)
            return torch.cat([h[-2], h[-1]], 1)

    learner = evcl.Naive(Packed(), epochs=1)
    learner.learn(tokens())
    with pytest.raises(evcl.EvclError, match="its forward must not depend on the values of its inputs"):
        learner.export(tmp_path / "model.pt2")


def test_onnx_without_its_packages(tmp_path, monkeypatch):
    learner = evcl.Naive(evcl.nn.mlp(5, [8]), epochs=1)
    learner.learn(rows())
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(evcl.EvclError, match=r"pip install 'evcl\[onnx\]'"):
        learner.export(tmp_path / "model.onnx")


def test_packed_inputs_are_packed_again():
    inputs = {"a": torch.randint(0, 9, (4, 3)), "b": torch.randn(4, 2), "c": torch.rand(4, 3, 2) > 0.5}
    x, form = pack(inputs, pads={"a": 7})
    _, named = form.unpack(x)
    assert torch.equal(form.packed(named, x.dtype), x)
