"""The weights of pretrained networks, from bytes. No code is ever run: a torch file is read with `weights_only`."""

from __future__ import annotations

import io
import pickle

import safetensors.torch
import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl.data.formats import BROKEN, UInt8, first_line


def read_safetensors(content: UInt8) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    try:
        return safetensors.torch.load(content.tobytes())
    except safetensors.SafetensorError as error:
        raise EvclError(f"it is not a safetensors file ({first_line(error)})") from error


def read_torch(content: UInt8) -> dict[str, Tensor]:
    """The tensors of a file written by `torch.save` that holds nothing but tensors by name."""
    try:
        tensors = torch.load(io.BytesIO(content.tobytes()), map_location="cpu", weights_only=True)
    except (*BROKEN, pickle.UnpicklingError, IndexError) as error:
        raise EvclError(f"it is not a file of tensors ({first_line(error)})") from error
    if not isinstance(tensors, dict) or not all(isinstance(one, Tensor) for one in tensors.values()):
        raise EvclError("it is not a file of tensors by name")
    return dict(tensors)
