"""What the tests of networks share."""

from __future__ import annotations

import pytest
import torch

from evcl.nn import convert


@pytest.fixture
def torch_draws():
    """A test's own modules may draw their weights from torch's global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def registered(monkeypatch):
    """Register a layer, as `evcl.nn.register` does, for one test."""
    monkeypatch.setattr(convert, "_FORMS", dict(convert._FORMS))
    return convert.register
