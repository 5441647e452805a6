"""The weights of pretrained networks: a reader of safetensors files, and torch's reader of plain tensors.

No code is ever run: a safetensors file is a JSON header and numbers, and a torch file is read with `weights_only`.
The reader is our own because it works on an array of the cache, which is memory-mapped, and checks every bound itself.
"""

from __future__ import annotations

import io
import math
import pickle

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.files import parsed
from evcl.data.formats import BROKEN, UInt8

MOST_HEADER = 10_000_000  # bytes
DTYPES = {  # the types of numbers that can occur, by their names in a safetensors file
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_safetensors(content: UInt8) -> dict[str, Tensor]:
    """The tensors of a safetensors file. They share memory with `content`, which should be memory-mapped.

    The file is 8 bytes with the length of the header, little-endian; the header, JSON that maps each name to a type,
    a shape and the tensor's first and last byte; and the bytes of the tensors.
    """
    if len(content) < 8:
        raise EvclError("it is not a safetensors file: it is too short")
    length = int.from_bytes(content[:8].tobytes(), "little")
    if length > min(MOST_HEADER, len(content) - 8):
        raise EvclError(f"it is not a safetensors file: its header would have {length} bytes")
    try:
        header = parsed(content[8 : 8 + length].tobytes().decode("utf-8"))
    except ValueError as error:
        raise EvclError(f"it is not a safetensors file: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise EvclError("it is not a safetensors file: its header names no tensors")
    body, found, last = content[8 + length :], {}, 0
    about = {name: one for name, one in header.items() if name != "__metadata__"}
    for name, (start, end, dtype, shape) in sorted(
        ((name, _checked(name, one)) for name, one in about.items()), key=lambda pair: pair[1][:2]
    ):
        if start != last or end > len(body):
            raise EvclError(f"tensor {name!r} is at bytes {start} to {end}, but those before it end at {last}")
        part, last = body[start:end], end
        if part.ctypes.data % dtype.itemsize:
            part = part.copy()
        found[name] = torch.from_numpy(part).view(dtype).view(shape) if part.size else torch.empty(shape, dtype=dtype)
    if last != len(body):
        raise EvclError(f"its tensors have {last} bytes, but the file has {len(body)}")
    return found


def _checked(name: str, about: object) -> tuple[int, int, torch.dtype, tuple[int, ...]]:
    """First byte, last byte, type and shape of one tensor."""
    wrong = EvclError(f"the header's entry of tensor {name!r} is damaged")
    if not isinstance(about, dict) or about.get("dtype") not in DTYPES:
        raise wrong
    numbers: list[list[int]] = []
    for key in ("shape", "data_offsets"):
        some = about.get(key)
        if not isinstance(some, list) or not all(type(one) is int and one >= 0 for one in some):
            raise wrong
        numbers.append(some)
    shape, places = numbers
    dtype = DTYPES[about["dtype"]]
    if len(places) != 2 or places[1] - places[0] != math.prod(shape) * dtype.itemsize:
        raise wrong
    return places[0], places[1], dtype, tuple(shape)


def read_torch(content: UInt8) -> dict[str, Tensor]:
    """The tensors of a file written by `torch.save` that holds nothing but tensors by name."""
    try:
        found = torch.load(io.BytesIO(content.tobytes()), map_location="cpu", weights_only=True)
    except (*BROKEN, pickle.UnpicklingError, IndexError) as error:
        raise EvclError(f"it is not a file of tensors ({(str(error).splitlines() or [''])[0]})") from error
    if not isinstance(found, dict) or not all(isinstance(one, Tensor) for one in found.values()):
        raise EvclError("it is not a file of tensors by name")
    return dict(found)
