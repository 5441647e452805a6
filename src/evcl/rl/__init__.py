"""Reinforcement learning: agents that learn a stream of environments, one after another.

In: environments side by side, as gymnasium has them. Out: an `Agent`, and the returns on every task after each.
To change: algorithms; the methods are the library's own, and only `methods.py` gives them other settings. Fixed:
golden numbers (`tests/test_golden_applications.py`), and tensors are [T, B]: T steps of B environments.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from evcl.rl.acting import frames, returns
from evcl.rl.advantages import Path, gae, vtrace
from evcl.rl.agent import Agent
from evcl.rl.cartpole import Variant
from evcl.rl.environments import Environments, Gymnasium, Outcome
from evcl.rl.learning import StreamOutcome, learn
from evcl.rl.measures import average_return, forgetting, forward_transfer, normalised_return
from evcl.rl.methods import method
from evcl.rl.sb3 import adopt, trunk_of
from evcl.rl.streams import STREAMS, Stream, Task, from_gymnasium, stream

__all__ = [
    "STREAMS",
    "Agent",
    "Environments",
    "Gymnasium",
    "Outcome",
    "Path",
    "Stream",
    "StreamOutcome",
    "Task",
    "Variant",
    "adopt",
    "average_return",
    "forgetting",
    "forward_transfer",
    "frames",
    "from_gymnasium",
    "gae",
    "learn",
    "method",
    "normalised_return",
    "returns",
    "stream",
    "trunk_of",
    "vtrace",
]


def _cartpole(variant: Variant, seeds: Sequence[int], envs: int, purpose: str, device: torch.device) -> Environments:
    return variant.make(seeds, envs, purpose, device)


def __getattr__(name: str) -> Any:
    if name not in ("METHODS", "CartPole"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    use = "evcl.rl.method(name), which takes all methods" if name == "METHODS" else "Variant(...).make(...)"
    warnings.warn(f"evcl.rl.{name} goes in 0.4: use {use}", DeprecationWarning, stacklevel=2)
    if name == "CartPole":
        return _cartpole
    return {one: method(one) for one in ("evcl", "vcl", "ewc", "clear", "naive", "separate")}
