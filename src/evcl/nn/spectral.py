"""Spectral norm: W / sigma(W), where sigma is the largest singular value, estimated by power iteration.

    u <- W v / |W v|,   v <- W^T u / |W^T u|,   sigma = u^T W v

u and v are state beside the weights, one pair per replica. As in torch, they follow the weights in training, by a few
iterations per forward pass, and are fixed in evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm as OldHook

from evcl.nn.layer import BayesianLayer, Weights


class SpectralNorm(BayesianLayer):
    """The parametrisation of `torch.nn.utils.parametrizations.spectral_norm`, for one replica at a time."""

    keys = "_u", "_v"
    u_first = True  # which of the two an iteration updates first
    batched = False

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.dim, self.eps, self.iterations = layer.dim, layer.eps, layer.n_power_iterations
        self._hold(*(getattr(layer, key, None) for key in self.keys))

    def _hold(self, *state: Tensor | None) -> None:
        for key, tensor in zip(self.keys, state, strict=True):
            if tensor is not None:  # a vector has none
                self.register_buffer(key, tensor.detach().clone().unsqueeze(0), persistent=False)

    def begin(self) -> None:
        """New buffers, so that the task can be undone."""
        for key, buffer in list(self.named_buffers(recurse=False)):
            setattr(self, key, buffer.clone())

    def forward(self, weight: Tensor) -> Tensor:
        if weight.dim() == 1:
            return F.normalize(weight, dim=0, eps=self.eps)
        axes = [self.dim, *(axis for axis in range(weight.dim()) if axis != self.dim)]
        matrix, rows = weight.permute(axes).flatten(1), self.weights.rows
        rows = slice(None) if rows is None else rows
        u, v = (getattr(self, key)[rows].squeeze(0) for key in self.keys)
        if self.weights.noise is not None and isinstance(rows, slice) and matrix.requires_grad:  # in training
            with torch.no_grad():
                both = [(matrix, v, u), (matrix.mT, u, v)]
                for _ in range(self.iterations):
                    for a, vector, into in both if self.u_first else reversed(both):
                        torch.mv(a, vector, out=into)
                        into.div_(into.norm().clamp_min(self.eps))
        sigma = torch.vdot(u.clone(), torch.mv(matrix, v.clone()))  # copies: the next pass changes u and v in place
        return weight / sigma

    def right_inverse(self, value: Tensor) -> Tensor:
        return value


class _OldSpectralNorm(SpectralNorm):
    """The state of `torch.nn.utils.spectral_norm`, which is a hook of the layer rather than a module."""

    u_first = False

    def __init__(self, hook: Any, layer: nn.Module) -> None:
        BayesianLayer.__init__(self, nn.Identity())
        self.keys = f"{hook.name}_u", f"{hook.name}_v"
        self.dim, self.eps, self.iterations, self.parameter = hook.dim, hook.eps, hook.n_power_iterations, hook.name
        self._hold(*(layer._buffers.pop(key) for key in self.keys))

    def hook(self, layer: nn.Module, args: object) -> None:
        """A forward pre-hook, in place of torch's."""
        setattr(layer, self.parameter, self(getattr(layer, f"{self.parameter}_orig")))


def attach_state(layer: nn.Module, path: str, weights: Weights, stateful: Callable[[BayesianLayer], None]) -> None:
    """Replace the hooks of the old spectral norm by ones whose state is kept per replica."""
    hooks = layer._forward_pre_hooks
    for key, hook in list(hooks.items()):
        if isinstance(hook, OldHook):
            state = _OldSpectralNorm(hook, layer)
            state.weights, state.path = weights, path
            stateful(state)
            hooks[key] = state.hook
            layer.add_module(f"{hook.name}_spectral", state)
