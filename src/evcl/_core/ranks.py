"""One network on many devices: processes that hold the same weights, each with its part of every batch.

torchrun starts them. They meet once a step, to add up the flat gradient, and where something is decided.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.torchrun import number, world


class Ranks:
    """The processes of one run, of which this is number `rank`. Each method is called by all of them, or none."""

    def __init__(self) -> None:
        """Of the process group that is there."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def part(self, count: int) -> slice:
        """This process's part of that many things in a row; the parts differ by one at most."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place, the same bits on each."""
        with _together():
            dist.all_reduce(tensor)
        return tensor

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Process 0's, in place."""
        with _together():
            dist.broadcast(tensor, 0)
        return tensor

    def first(self, answer: bool, device: torch.device | str) -> bool:
        """What process 0 says."""
        return bool(self.broadcast_(torch.tensor(int(answer), device=device)))


@contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # a connection that is closed, or a wait that was too long
        raise EvclError(f"another process of this run has ended: {str(error).splitlines()[0]}") from error


def check_batch(batch_size: int, processes: int) -> None:
    if batch_size < processes:
        raise EvclError(
            f"{processes} processes cannot share batches of {batch_size} examples: start at most {batch_size}, "
            "or set a larger batch_size"
        )


@contextmanager
def joined(device: str = "cpu") -> Iterator[Ranks | None]:
    """The processes that torchrun started, by gloo on CPUs and NCCL on GPUs, one device each; None: there is only one.

    A process group that is there already is taken as it is.
    """
    if dist.is_available() and dist.is_initialized():
        yield Ranks() if dist.get_world_size() > 1 else None
        return
    if world() == 1:
        yield None
        return
    local, backend = number("LOCAL_RANK"), "gloo"
    if device == "cuda":
        backend, found = "nccl", torch.cuda.device_count()
        if local >= found:
            raise EvclError(
                f"there are more processes than GPUs here, {found}: --nproc-per-node {found}, or --device cpu"
            )
        torch.cuda.set_device(local)
    try:
        dist.init_process_group(backend)
    except (RuntimeError, ValueError) as error:
        raise EvclError(f"the processes do not find each other: {str(error).splitlines()[0]}") from error
    yield Ranks()
    dist.destroy_process_group()  # not after an error: the others may be gone, and it would wait for them
