"""BERT from plain layers: what it computes, its Bayesian form, and the pretrained networks where they were fetched."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import evcl
from evcl import data
from evcl._core.errors import EvclError
from evcl.nn import Bert, EfficientNetLite0
from evcl.nn.bert import BertTop, below

pytestmark = pytest.mark.usefixtures("torch_draws")


def small():
    return Bert(vocabulary=40, width=16, layers=3, heads=2, inner=32, positions=12)


def test_padding_changes_nothing_and_an_empty_text_is_finite():
    network = small()
    x = torch.randint(1, 40, (5, 6)).float()
    torch.testing.assert_close(network(F.pad(x, (0, 4))), network(x))
    torch.testing.assert_close(network(x).norm(dim=1), torch.full((5,), 4.0))
    assert network(torch.zeros(2, 6)).isfinite().all()
    with pytest.raises(EvclError, match="a length of up to 12"):
        network(torch.ones(1, 13))
    with pytest.raises(EvclError, match="multiple of heads"):
        Bert(width=10, heads=3)


def test_the_layers_above_continue_where_those_below_end():
    network = small()
    x = torch.randint(1, 40, (5, 6)).float()
    x[:2, 4:] = 0
    for first in range(4):
        torch.testing.assert_close(BertTop(network, first)(below(network, first, x)), network(x))


def test_all_of_it_can_be_bayesian():
    x = torch.randint(1, 40, (24, 6)).float()
    learner = evcl.EVCL(small(), epochs=2)
    learner.learn(x, (x[:, 0] > 20).long())
    learner.learn(x, (x[:, 1] > 20).long())
    assert len(learner.parts.run.network.trunk_names) == len(list(small().parameters()))
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
