"""What devices lack: Apple's GPUs (mps) have no float64, no CUDA graphs, and none of evcl's compiled code."""

from __future__ import annotations

import torch
from torch import Tensor

from evcl._core.errors import EvclError

LIMITED = {"mps"}  # devices for which torch has float32 at most


def limited(device: torch.device) -> bool:
    """Whether a device has only what torch offers everywhere."""
    return device.type in LIMITED


def double(tensor: Tensor) -> Tensor:
    """The tensor in float64; on the CPU if its device has none."""
    return (tensor.cpu() if limited(tensor.device) else tensor).double()


def usable(device: torch.device | str, dtype: torch.dtype = torch.float32, precision: str = "fp32") -> torch.device:
    """The device, if it can be used on this machine, with this dtype and precision; raises otherwise."""
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise EvclError(f"device {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from None
    if limited(found) and dtype == torch.float64:
        raise EvclError(f"device {found.type!r} has no float64: use dtype=torch.float32, or device='cpu'")
    if limited(found) and precision == "bf16":
        raise EvclError(f"device {found.type!r} trains in float32 only: use precision='fp32', or device='cpu'")
    return found
