"""Learners in bfloat16: every kind of layer trains in it, and what the learner keeps stays float32."""

from __future__ import annotations

import pytest
import torch
from models import Net
from torch import nn

import evcl


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
    with torch.random.fork_rng():
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
        weights[precision] = learner.parts.run.network.posterior.mean
    assert weights["bf16"].dtype == torch.float32
    assert not torch.equal(weights["bf16"], weights["fp32"])
    assert accuracy["fp32"] > 0.8
    assert abs(accuracy["bf16"] - accuracy["fp32"]) < 0.06
    learner.save(tmp_path / "model.safetensors")
    network = None if name == "perceptron" else seeded(make)
    again = evcl.load(tmp_path / "model.safetensors", *[] if network is None else [network])
    assert again.parts.run.precision == "bf16"


def test_an_unknown_precision_is_refused():
    with pytest.raises(evcl.EvclError, match="precision must be fp32, tf32 or bf16, not 'fp16'"):
        evcl.EVCL(evcl.nn.mlp(2, [2]), precision="fp16")
