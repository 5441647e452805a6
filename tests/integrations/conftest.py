"""Other libraries warn, and draw from torch's global generator."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _own_generator():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "integrations" and item.path.name != "test_penalty.py":
            item.add_marker(pytest.mark.filterwarnings("ignore"))
