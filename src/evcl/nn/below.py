"""The part of a trunk that never changes: all of it, or the first layers of an `nn.Sequential`.

What this part makes of an example is the same in every epoch, for every draw of the weights and for all replicas. So it
is computed once, and the rest of the network goes on from there. It must have weights, otherwise there is nothing to
gain, and none of them may train; it must have no dropout, no FiLM and no statistics that are still being measured.
"""

from __future__ import annotations

from torch import Tensor, nn

from evcl.nn.layer import BayesianLayer
from evcl.nn.layers import Dropout

KEPT_NUMBERS = 2**26  # that may always be kept, 256 MB in float32; more only if the inputs are half as large
WHOLE = -1  # instead of a number of layers


def fixed_layers(trunk: nn.Module) -> int:
    """The number of first layers that never change, or WHOLE; 0 if there are none."""
    if _fixed(trunk):
        return WHOLE if _has_weights([trunk]) else 0
    if type(trunk) is not nn.Sequential or trunk._forward_hooks or trunk._forward_pre_hooks:
        return 0
    count = next(i for i, layer in enumerate(trunk) if not _fixed(layer))
    return count if _has_weights(list(trunk)[:count]) else 0


def _fixed(part: nn.Module) -> bool:
    own = [layer for layer in part.modules() if isinstance(layer, BayesianLayer)]
    return all(isinstance(layer, Dropout) and layer.p == 0 for layer in own)


def _has_weights(layers: list[nn.Module]) -> bool:
    return any(True for layer in layers for _ in layer.parameters())


def may_be_kept(one: Tensor, two: Tensor, x: Tensor) -> bool:
    """Whether the outputs for all of x [U, N, ...] may be kept. `one` is that for its first row alone, and `two` are
    those for its first two rows: they must agree, because only then do examples not affect each other.
    """
    if len(one) != 1 or len(two) != min(2, x.shape[1]) or one.shape[1:] != two.shape[1:]:
        return False
    apart = bool((two[:1] - one).abs().max() <= 1e-3 * one.abs().max().clamp_min(1e-30))
    return apart and one.numel() * x.shape[0] * x.shape[1] <= max(KEPT_NUMBERS, 2 * x.numel())
