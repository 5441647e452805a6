"""Check on a few examples how a module treats its batch, and refuse one in which examples affect each other.

Replicas share one batch, and the Fisher is estimated example by example. Both need a network whose output for an
example depends on nothing else in the batch, and layers that receive an example's rows together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from evcl._core.devices import double
from evcl._core.errors import EvclError
from evcl.nn.layer import BayesianLayer
from evcl.nn.network import BayesianNetwork
from evcl.nn.sampled import FreeParameter

FIX = (
    "Keep the batch as the first axis, and do not let examples affect each other; otherwise only one network at a time "
    "can learn, with a method that does not use the Fisher (vcl, naive)"
)


class Pass(NamedTuple):
    """A record of one forward pass: the layers in the order of their calls, each with its input, and the output."""

    calls: list[tuple[BayesianLayer, Tensor]]
    output: Tensor


@torch.no_grad()
def check_examples_independent(network: BayesianNetwork, x: Tensor, strict: bool) -> None:
    """Check how the trunk treats examples like x [n, ...].

    If the whole batch shares a layer's input (such as positions), that layer will receive it once per example from now
    on, so that each example has its own draw of the weights. If its output is not merely added or expanded, or if the
    batch is not the first axis of its input, the plain layer is used instead, with one draw per batch. A layer that
    receives several rows per example, folded into the batch, is told their number (`fold`). With `strict`, a network
    that mixes examples is an error; otherwise it is left unchanged.
    """
    undo: list[Callable[[], None]] = []
    x = x[torch.arange(3) % len(x)]
    _check_deterministic(network, x)
    try:
        with network.alone():
            _look(network, x, undo)
    except (EvclError, RuntimeError) as error:
        for step in undo:
            step()
        mixes = isinstance(error, EvclError)
        if not strict and (mixes or not network.owned):
            return
        if mixes:
            raise
        raise EvclError(
            f"the network fails on a small batch: {str(error).splitlines()[0]}. A parameter [1, ...] outside a layer "
            "is replaced by one copy per example: add it or .expand() it, do not .repeat() it"
        ) from error


def _check_deterministic(network: BayesianNetwork, x: Tensor) -> None:
    """Refuse a network that draws random numbers itself: its results would not follow from the seed."""
    with torch.random.fork_rng([x.device] if x.is_cuda else []), network.alone():
        before = _generator_state(x)
        try:
            network(x.clone())
        except (EvclError, RuntimeError):
            return  # the caller finds out what is wrong
        finally:
            after = _generator_state(x)
            if x.is_mps:  # of which `fork_rng` knows nothing
                torch.mps.set_rng_state(before)
        if torch.equal(before, after):
            return
    raise EvclError(
        "the network draws random numbers from torch's global generator, so that its results do not follow from the "
        "seed. For dropout use nn.Dropout; in F.dropout and scaled_dot_product_attention draw only if self.training, "
        "which is False here"
    )


def _generator_state(x: Tensor) -> Tensor:
    """The state of torch's global generator for the device of x."""
    if x.is_mps:
        return torch.mps.get_rng_state()
    return torch.cuda.get_rng_state(x.device) if x.is_cuda else torch.get_rng_state()


def _look(network: BayesianNetwork, x: Tensor, undo: list[Callable[[], None]]) -> None:
    two, three = _trace(network, x[:2]), _trace(network, x)
    plain = three.output
    while (shared := _shared(two, three)) is not None:
        undo.append(shared.register_forward_pre_hook(_each_example).remove)
        try:
            two, three = _trace(network, x[:2]), _trace(network, x)
            same = _shared(two, three) is not shared and torch.allclose(three.output, plain, rtol=1e-3, atol=1e-4)
        except (EvclError, RuntimeError):
            same = False
        if not same:
            undo.pop()()
            if not network.use_directly(shared):
                raise EvclError(
                    f"{_called(shared)} gets the same number of rows for every batch size: the batch is not its first "
                    f"axis, or the batch shares its input and the output is not merely added or expanded. {FIX}"
                )
            two, three = _trace(network, x[:2]), _trace(network, x)
            plain = three.output
    for (layer, a), (_, b) in zip(two.calls, three.calls, strict=False):
        layer.fold = max(1, len(a) // 2)
        if (len(a), len(b)) != (2 * layer.fold, 3 * layer.fold):
            raise EvclError(f"{_called(layer)} gets {len(a)} rows for 2 examples and {len(b)} for 3. {FIX}")
    for row in (0, 2):
        changed = x.clone()
        changed[row] = x[1] if not torch.equal(x[1], x[row]) else torch.zeros_like(x[row])
        other = _trace(network, changed)
        for (layer, a), (_, b) in zip(three.calls, other.calls, strict=False):
            if _touches(a, b, row, layer.fold):
                raise EvclError(f"the examples of a batch are mixed before {_called(layer)}. {FIX}")
        if _touches(three.output, other.output, row, 1):
            raise EvclError(f"the network mixes the examples of a batch. {FIX}")


def _shared(two: Pass, three: Pass) -> BayesianLayer | None:
    """The first layer whose input has as many rows for three examples as for two: it does not depend on the batch."""
    both = zip(two.calls, three.calls, strict=False)
    return next((layer for (layer, a), (_, b) in both if len(a) == len(b)), None)


def _trace(network: BayesianNetwork, x: Tensor) -> Pass:
    calls: list[tuple[BayesianLayer, Tensor]] = []

    def note(layer: BayesianLayer, args: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append((layer, args[0].clone()))

    layers = [layer for layer in network.trunk_layers() if layer.batched and not isinstance(layer, FreeParameter)]
    handles = [layer.register_forward_hook(note) for layer in layers]
    try:
        return Pass(calls, network(x.clone()))
    finally:
        for handle in handles:
            handle.remove()


def _touches(before: Tensor, after: Tensor, example: int, fold: int) -> bool:
    """Whether rows of other examples changed by more than rounding. Rows that are padded to the longest sequence of
    their batch cannot be compared if their lengths differ; the outputs always can.
    """
    if before.shape != after.shape:
        return False
    others = torch.ones(len(before), dtype=torch.bool)
    others[example * fold : (example + 1) * fold] = False
    a, b = double(before[others]), double(after[others])
    return a.numel() > 0 and bool((a - b).abs().max() > 1e-4 * max(float(a.abs().max()), 1e-30))


def _each_example(layer: BayesianLayer, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A forward pre-hook: expand an input that the batch shares, [t, ...] or [1, t, ...], to [R*B, t, ...]."""
    x = args[0]
    x = x[0] if x.dim() > 1 and len(x) == 1 else x
    return (x.expand(layer.weights.batch, *x.shape), *args[1:])


def _called(layer: BayesianLayer) -> str:
    return f"{layer.path!r} ({type(layer).__name__})"
