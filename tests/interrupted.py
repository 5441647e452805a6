"""A run that is stopped again and again, compared with one that is not."""

from __future__ import annotations

from itertools import count, cycle

import torch
from msgspec.structs import replace

from evcl.experiments import execute
from evcl.training import Checkpoints, Stopped
from evcl.training.checkpoint import newest


def assert_stopped_run_ends_the_same(config, folder, polls=(4,), least=3):
    """Stopped at one of these polls after another and resumed until it has ended, it leaves the same result and the
    same tensors, bit for bit. Returns where it was stopped, which was at `least` so often: rounds, and their stages.
    """

    def last(name):
        (program,) = (folder / name).iterdir()
        return newest(program)

    wanted, stopped = execute(config, checkpoints=Checkpoints(folder / "whole", 0)), []
    for most in cycle(polls):
        number = count(1)
        try:
            stop = lambda number=number, most=most: next(number) >= most  # noqa: E731
            found = execute(config, checkpoints=Checkpoints(folder / "parts", 1e6, resume=True, stop=stop))
            break
        except Stopped:
            where = last("parts").description
            stopped.append((where["round"], where.get("stage")))
    assert len(stopped) >= least
    assert replace(found, seconds=0.0) == replace(wanted, seconds=0.0)
    ours, theirs = (last(name).tensors for name in ("parts", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)) for name in theirs)
    return set(stopped)
