"""A run that is stopped again and again, compared with one that is not."""

from __future__ import annotations

from itertools import count

import torch

from evcl.experiments import execute
from evcl.training import Checkpoints, Stopped
from evcl.training.checkpoint import newest


def assert_stopped_run_ends_the_same(config, folder):
    """Stopped within its epochs and resumed until it has ended, it leaves the same tensors, bit for bit."""
    execute(config, checkpoints=Checkpoints(folder / "whole", 0))
    stops = 0
    while True:
        polls = count()
        try:
            execute(
                config, checkpoints=Checkpoints(folder / "parts", 1e6, resume=True, stop=lambda p=polls: next(p) >= 4)
            )
            break
        except Stopped:
            stops += 1
    assert stops > 2
    found, wanted = (newest(next((folder / name).iterdir())).tensors for name in ("parts", "whole"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name].view(torch.uint8), wanted[name].view(torch.uint8)) for name in wanted)
