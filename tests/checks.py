"""What the tests of many files check in the same way, and how they make a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import evcl
from evcl._core.settings import resolve
from evcl.methods import METHODS, Method
from evcl.training import Run


@contextmanager
def refused(message: str = "") -> Iterator[pytest.ExceptionInfo[evcl.EvclError]]:
    """The block raises an error of one line, which contains this message."""
    with pytest.raises(evcl.EvclError) as raised:
        yield raised
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def blobs(
    labels: Sequence[object] = (0, 1), n: int = 60, seed: int = 0, width: int = 4
) -> tuple[np.ndarray, np.ndarray]:
    """Two well separated clouds: inputs and labels."""
    source = np.random.default_rng(seed)
    y = np.arange(n) % len(labels)
    return (source.normal(size=(n, width)) + 3 * y[:, None]).astype(np.float32), np.array(labels)[y]


def quietly(make: Callable[[], Any], seed: int = 0) -> Any:
    """What `make` makes with torch's global generator at a seed; that generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def state(one: evcl.Learner | Run) -> dict[str, torch.Tensor]:
    """Copies of all tensors that a learner or a run consists of."""
    run = one.state.run if isinstance(one, evcl.Learner) else one
    return {name: tensor.clone() for name, tensor in run.tensors().items()}


def same(*each: evcl.Learner | Run | dict[str, torch.Tensor]) -> bool:
    """Whether these consist of the same tensors, to the last bit."""
    first, *others = (one if isinstance(one, dict) else state(one) for one in each)
    return all(o.keys() == first.keys() and all(torch.equal(o[name], first[name]) for name in first) for o in others)


def bits(learner: evcl.Learner) -> tuple[dict[str, Any], dict[str, bytes]]:
    """All that a learner's file would hold, to the last bit."""
    description, tensors = learner.described()
    return description, {name: bytes(t.reshape(-1).view(torch.uint8).numpy()) for name, t in tensors.items()}


def run_of(
    method: str | Method,
    network: torch.nn.Module,
    given: Mapping[str, Any] | Sequence[Mapping[str, Any]] = (),
    seeds: Sequence[int] = (0,),
    heads: tuple[int, Sequence[int]] | None = None,
    **options: Any,
) -> Run:
    """A run with these settings, or with those of each seed; `heads`: their inputs, and the classes of each."""
    method = METHODS[method] if isinstance(method, str) else method
    each = [dict(given)] * len(seeds) if isinstance(given, Mapping) or not given else given
    settings = [resolve(method.name, method.known_settings, one) for one in each]
    run = Run(network, method, settings, seeds, draw=True, **options)
    if heads is not None:
        run.add_heads(*heads)
    return run
