"""A device called stand_in, for machines without an Apple GPU. As that one, it has no float64, no generators, and no
memory in common with the CPU: an operation on tensors of both is an error. It computes on the CPU.

`python stand_in.py FOLDER METHOD ...` trains each method on it. In a process of its own: torch keeps such a device.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import evcl
from evcl._core import devices
from evcl.experiments import configure
from evcl.experiments.run import execute
from evcl.methods import METHODS

NAME = "stand_in"
BETWEEN = ("aten::copy_", "aten::_to_copy", "aten::index")  # these may have tensors of both devices


def register():
    class Module(backend_registration._DummyBackendModule):
        def get_amp_supported_dtype(self):
            return []

    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    devices.LIMITED.add(NAME)


class StandIn(torch.Tensor):
    """A tensor of the device, around one of the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw):
        if raw.dtype in (torch.float64, torch.complex128):
            raise TypeError("this device has no float64")
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset()}
        found = torch.Tensor._make_wrapper_subclass(cls, raw.size(), **layout, dtype=raw.dtype, device=f"{NAME}:0")
        found.raw = raw
        return found

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return computed(function, args, kwargs or {})


def computed(function, args, kwargs):
    name, device = function._schema.name, kwargs.get("device")
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    ours = [one for one in tensors if isinstance(one, StandIn)]
    if ours and not name.startswith(BETWEEN) and any(one.dim() for one in tensors if not isinstance(one, StandIn)):
        raise RuntimeError(f"{name}: tensors on {NAME} and on the CPU")
    known = {id(one.raw): one for one in ours}
    args, kwargs = tree_map(lambda leaf: leaf.raw if isinstance(leaf, StandIn) else leaf, (args, kwargs))
    here = bool(ours) if device is None else torch.device(device).type == NAME
    found = function(*args, **{**kwargs, **({} if device is None else {"device": torch.device("cpu")})})
    if name == "aten::copy_":
        here = id(args[0]) in known

    def wrapped(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return known.get(id(leaf)) if id(leaf) in known else StandIn(leaf) if here else leaf

    return tree_map(wrapped, found)


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if any(issubclass(one, StandIn) for one in types) or (device and torch.device(device).type == NAME):
            return computed(function, args, kwargs)
        return function(*args, **kwargs)


class FromPython(TorchFunctionMode):
    """What torch does in C++, unseen by `Operations`: tensors from numbers and lists, and back."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, own = dict(kwargs or {}), bool(args) and isinstance(args[0], StandIn)
        if function in (torch.tensor, torch.as_tensor) and not own and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return function(*args, **kwargs).to(device)
        if function is torch.Tensor.new_tensor and own:
            return torch.tensor(args[1], dtype=args[0].dtype).to(NAME)
        if function is torch.Tensor.tolist and own:
            return args[0].cpu().tolist()
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and own:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(torch.tensor(one) if isinstance(one, list) else one for one in index)
            return function(args[0], index, *args[2:])
        return function(*args, **kwargs)


@contextmanager
def used():
    with FromPython(), Operations():
        yield


Y = np.arange(60) % 2
X = (np.random.default_rng(0).normal(size=(60, 4)) + Y[:, None]).astype(np.float32)


def network(method):
    """One that evcl's compiled code does not compute, on any device."""
    if METHODS[method].trunk is not None or method == "progress-compress":
        return evcl.nn.mlp(4, [8])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Conv1d(1, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.ReLU(), nn.Dropout(0.1), nn.Flatten()
    return nn.Sequential(nn.Unflatten(1, (1, 4)), *layers)


def learned(method, device, folder):
    """Three tasks, the third with new classes; saved, loaded and predicted."""
    learner = evcl.Learner(network(method), method, epochs=2, device=device, init="draw")
    weighted = {} if "coreset" in method else {"class_weight": "balanced", "sample_weight": 1 + Y}
    learner.learn((X, Y), "a")
    learner.learn((X, 1 - Y), "b", validation=0.2, patience=2, **weighted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the new classes may make it forget the old ones
        learner.learn((X, Y + 2), "c", "a")
    learner.save(folder / f"{method} {device}.safetensors")
    found = learner.predictions(X, task="a")
    accuracy = learner.measure((X, Y + 2), task="c").accuracy
    return {"p": found.probabilities, "far": found.unfamiliar, "accuracy": np.array(accuracy)}


def streamed(device):
    """What `evcl run` does, on a benchmark with permuted images."""
    config = configure("permuted-digits", "evcl", "default", [0], 2, {"epochs": 1, "network": "8"})
    return {"accuracy": np.array(execute(replace(config, device=device)).accuracy, dtype=float)}


def main(folder, methods):
    register()
    with used():
        np.savez(folder / "stream.npz", **streamed(NAME))
        for method in methods:
            np.savez(folder / f"{method}.npz", **learned(method, NAME, folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
