"""Generators owned by a run: each a function of (seed, purpose, indices), none of them global.

Because a generator is derived and never carried over, a run needs no generator state to go on: its seed and the
number of tasks it has learned are enough.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


def generator(seed: int, purpose: str, *indices: int, device: torch.device | str = "cpu") -> torch.Generator:
    """The generator of one purpose, independent of every other purpose, index and seed."""
    key = ":".join([str(seed), purpose, *map(str, indices)]).encode()
    number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return torch.Generator(device=device).manual_seed(number & (2**63 - 1))


class Noise(Protocol):
    """Where layers draw from while they train. Shapes start with the replica axis R."""

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor: ...

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor: ...


class DeviceNoise:
    """One generator for all replicas: one draw a call, as a GPU wants it.

    Kernels that draw for themselves take `seed`, a number on the device that changes at each step, and a `salt` that
    differs from call to call.
    """

    def __init__(self, source: torch.Generator) -> None:
        self.source = source
        self.seed = torch.zeros(1, dtype=torch.long, device=source.device)
        self._calls = 0

    def salt(self) -> int:
        self._calls += 1
        return self._calls << 32

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return like.new_empty(shape).normal_(generator=self.source)

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return like.new_empty(shape).uniform_(generator=self.source)


class GeneratorNoise:
    """One generator a replica, so that a replica's draws do not depend on its neighbours."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = generators

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        out = like.new_empty(shape)
        for row, source in zip(out, self.generators, strict=True):
            row.normal_(generator=source)
        return out

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        out = like.new_empty(shape)
        for row, source in zip(out, self.generators, strict=True):
            row.uniform_(generator=source)
        return out
