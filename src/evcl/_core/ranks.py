"""Data-parallel training: processes hold the same weights, and each computes its part of every batch.

torchrun starts them. They communicate once per step, to sum the flat gradient, and wherever a decision is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.torchrun import number, world

COLLECTIVE_TIMEOUT = timedelta(minutes=5)  # torch's own 30 minutes look like a hang


class Ranks:
    """The processes of one run; this one is number `rank` of `size`. Either all of them call a method, or none does."""

    def __init__(self) -> None:
        """Use the existing process group."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # NCCL's sums are kernels, which a CUDA graph can hold; those of gloo are computed by the host.
        self.capturable = "cuda:nccl" in dist.get_backend_config().split(",")

    def part(self, count: int) -> slice:
        """This process's contiguous part of `count` items; the sizes of the parts differ by at most one."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over all processes, in place; the result is bit-identical on all of them."""
        with _together():
            dist.all_reduce(tensor)
        return tensor

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Overwrite with process 0's value, in place."""
        with _together():
            dist.broadcast(tensor, 0)
        return tensor

    def first(self, answer: bool, device: torch.device | str) -> bool:
        """Return process 0's answer."""
        return bool(self.broadcast_(torch.tensor(int(answer), device=device)))


@contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # a closed connection or a timeout
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise  # nothing is sent while a graph is captured: the cause is in this process
        why = str(error).splitlines()[0]
        raise EvclError(f"another process of this run has ended, or does not answer: {why}") from error


def check_batch(batch_size: int, processes: int) -> None:
    if batch_size < processes:
        raise EvclError(
            f"{processes} processes cannot share batches of {batch_size} examples: start at most {batch_size}, "
            "or set a larger batch_size"
        )


@contextmanager
def joined(device: str = "cpu") -> Iterator[Ranks | None]:
    """Join the processes that torchrun started, one device each, over gloo on CPUs or NCCL on GPUs. Yields None if
    there is only one process.

    A process that waits longer than COLLECTIVE_TIMEOUT for the others gives up. An existing process group is used.
    """
    if dist.is_available() and dist.is_initialized():
        yield Ranks() if dist.get_world_size() > 1 else None
        return
    if world() == 1:
        yield None
        return
    if device == "mps":
        raise EvclError("several processes cannot train on mps together: use --device cpu, or no torchrun")
    local, backend = number("LOCAL_RANK"), "gloo"
    if device == "cuda":
        backend, gpus = "nccl", torch.cuda.device_count()
        if local >= gpus:
            raise EvclError(
                f"more processes than GPUs on this machine ({gpus}): use --nproc-per-node {gpus}, or --device cpu"
            )
        torch.cuda.set_device(local)
    try:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise EvclError(f"the processes cannot connect to each other: {str(error).splitlines()[0]}") from error
    yield Ranks()
    dist.destroy_process_group()  # not after an error: other processes may have ended, and this would wait for them
