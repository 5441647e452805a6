"""What the tests of networks share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def torch_draws():
    """A test's own modules may draw their weights from torch's global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
