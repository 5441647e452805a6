"""What devices lack: Apple's GPUs (mps) have no float64, no CUDA graphs, and none of evcl's compiled code."""

from __future__ import annotations

import torch
from torch import Tensor

LIMITED = {"mps"}  # devices for which torch has float32 at most


def limited(device: torch.device) -> bool:
    """Whether a device has only what torch offers everywhere."""
    return device.type in LIMITED


def double(tensor: Tensor) -> Tensor:
    """The tensor in float64; on the CPU if its device has none."""
    return (tensor.cpu() if limited(tensor.device) else tensor).double()
