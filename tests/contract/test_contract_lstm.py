"""The contract with a recurrent trunk, and with one whose own code uses its parameters."""

from __future__ import annotations

import pytest
import small
import torch
import torch.nn.functional as F
from calls import signal_at
from checks import bits, quietly
from torch import nn

import evcl


class LSTM(nn.Module):
    """Three time steps of two numbers, read by two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = nn.LSTM(2, 6, 2, dropout=0.1, bidirectional=True)

    def forward(self, x):
        said, _ = self.reads(x.view(-1, 3, 2).transpose(0, 1))
        return said.sum(0)


class Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.share = nn.Parameter(0.5 * torch.randn(12, 6)), nn.Parameter(torch.tensor(0.8))
        self.drop, self.out = nn.Dropout(0.1), nn.utils.parametrizations.weight_norm(nn.Linear(12, 12))

    def forward(self, x):
        return self.share * self.out(self.drop(F.linear(x, self.weight).tanh())).tanh()


NETWORKS = {"lstm": LSTM, "direct": Direct}
METHODS = ["evcl", "vcl", "ewc", "naive", "er", "lwf", "si", "mas", "kfac-evcl", "vogn"]


@pytest.mark.full
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", METHODS)
def test_three_seeds_in_one_program_are_three_alone(method, name):
    def train(seeds):
        return small.train(method, seeds, replicas=seeds, network=lambda: quietly(NETWORKS[name]))

    three = train([0, 1, 2])
    for r in range(3):
        for key, wanted in train([r]).items():
            torch.testing.assert_close(three[key][[r]], wanted, rtol=1e-8, atol=1e-8)


def learner(method, name):
    given = {"epochs": 3, "batch_size": 16, "memory": 10}
    known = evcl.methods.METHODS[method].known_settings
    some = {key: value for key, value in given.items() if key in known}
    found = evcl.Learner(quietly(NETWORKS[name]), method, seed=1, **some)
    found.learn(data(0), epochs=1)
    return found


def data(k):
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(k))
    return x, (x[:, k] > 0).long()


@pytest.mark.full
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", METHODS)
def test_saved_loaded_stopped_and_resumed_it_ends_where_it_would_have(method, name, tmp_path):
    whole = learner(method, name)
    whole.save(tmp_path / "model.safetensors")
    again = evcl.load(tmp_path / "model.safetensors", network=quietly(NETWORKS[name]))
    whole.learn(data(1))
    again.learn(data(1))
    assert bits(again) == bits(whole)
    for nth in (2, 4, 100):
        stopped = learner(method, name)
        try:
            with signal_at("Step.__call__", nth):
                stopped.learn(data(1), checkpoint=tmp_path / "c")
        except KeyboardInterrupt:
            assert nth < 100
    assert bits(stopped) == bits(whole)
