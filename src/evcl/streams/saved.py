"""A stream's file: its settings as JSON, and every tensor that rows have changed."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from evcl._core.errors import EvclError
from evcl.learner.persist import opened, write
from evcl.nn import MLP
from evcl.streams.alarm import Alarm
from evcl.streams.arrays import Json
from evcl.streams.stream import State, Stream

FORMAT = 3
NOTE = "evcl_stream"  # the name of the description in the metadata


def save(
    stream: Stream, path: str | os.PathLike[str], notes: Mapping[str, str] = {}, beside: Mapping[str, Tensor] = {}
) -> None:
    """Write a stream's file. `notes` are further texts for its metadata, `beside` further tensors."""
    about, tensors = parts_of(stream)
    write(path, (about, {**tensors, **beside}), notes, NOTE)


def parts_of(stream: Stream) -> tuple[Json, dict[str, Tensor]]:
    """A stream as what JSON can hold, and its tensors."""
    state = stream.state
    if state is None:
        raise EvclError("there is nothing to save before the first row is learned")
    own = stream.network
    about = {
        "format": FORMAT,
        "mlp": own.described() if type(own) is MLP else None,
        "own": own is not None and type(own) is not MLP,
        "likelihood": stream.likelihood,
        "settings": dict(stream.settings),
        "memories": None if stream.memories is None else [m if m < float("inf") else "inf" for m in stream.memories],
        "noise": stream.noise,
        "classes": stream.classes,
        "targets": state.targets,
        "shape": state.shape,
        "rows": stream.rows,
        "alarms": [alarm._asdict() for alarm in stream.alarms],
    }
    tensors = {name: torch.from_numpy(array).contiguous() for name, array in state.arrays().items()}
    return about, tensors


def load(path: str | os.PathLike[str], network: nn.Module | None = None) -> Stream:
    """The stream of a file."""
    with opened(path, NOTE) as (saved, file):
        if saved is None:
            raise EvclError("it is not a stream that was saved by evcl")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
        return restored(saved, tensors, network)


def restored(saved: Json, tensors: Mapping[str, Tensor], network: nn.Module | None = None) -> Stream:
    """The stream of these parts."""
    if saved["format"] != FORMAT:
        raise EvclError(f"the file has format {saved['format']!r}, but this version of evcl reads only {FORMAT}")
    if saved["own"] != (network is not None):
        raise EvclError(
            "pass the network with which it was saved: load(path, network)"
            if saved["own"]
            else "it has its own network: pass none"
        )
    if saved["mlp"] is not None:
        network = MLP(**saved["mlp"])
    memories = saved["memories"] and [float(m) for m in saved["memories"]]
    stream = Stream(
        network,
        saved["likelihood"],
        classes=saved["classes"],
        memories=memories,
        noise=saved["noise"],
        **saved["settings"],
    )
    targets, stream.rows = int(saved["targets"]), int(saved["rows"])
    shape = [int(n) for n in saved["shape"]]
    if math.prod(shape) != tensors["scaling/mean"].numel() or min(shape) < 1:  # before anything of that size is made
        raise EvclError("the shape of its rows does not fit")
    stream.state = State(stream, np.zeros((1, *shape)), targets or max(0, len(stream.classes) - 1))
    stream.alarms = [
        Alarm(a["row"], a["surprise"], tuple(a["columns"]), a["action"], tuple(a["reasons"])) for a in saved["alarms"]
    ]
    for name, array in stream.state.arrays().items():
        given = tensors.get(name)
        if given is None or given.shape != array.shape or given.numpy().dtype != array.dtype:
            raise EvclError(f"{name!r} is missing or does not fit")
        if given.is_floating_point() and not bool(given.isfinite().all()):
            raise EvclError(f"{name!r} is not finite")
    stream.state.restore({name: tensor.numpy().copy() for name, tensor in tensors.items()})
    return stream
