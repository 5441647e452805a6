"""Bayesian norms: y = n(x) gamma + beta, where n(x) has no weights and gamma and beta are Gaussian.

In training, each example has its own draw of gamma and beta, which all its positions share. Without positions, y itself
is drawn (local reparameterisation), which gives the same distribution with less variance in the gradients. The first
prior of gamma is centred on 1, so that an untrained norm passes on its normalised input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evcl._core.errors import EvclError
from evcl.nn.layer import BayesianLayer


class Norm(BayesianLayer):
    """A norm whose weights lie along the channels, [R*B, c, ...]."""

    random = False

    def normalise(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        """n(x), with the shape of x [R*B, ...]; with one replica, n(x) scale + shift."""
        raise NotImplementedError

    def scale(self, parameter: str) -> float:
        """The scale of a norm is seldom outside 0.5 to 1.5."""
        return 0.25

    def centre(self, parameter: str) -> Tensor:
        return torch.full_like(self.own[parameter], float(parameter == "weight"))

    def positions(self, x: Tensor, shape: torch.Size) -> list[int]:
        """The axes of x [R, B, ...] that weights of this shape do not extend along."""
        return list(range(3, x.dim()))

    def forward(self, x: Tensor) -> Tensor:
        gamma = self.mean("weight")
        if gamma is not None and self.weights.variance is None and len(gamma) == 1 and x.is_cuda:
            return self.normalise(x, gamma[0], None if (beta := self.mean("bias")) is None else beta[0])  # in one pass
        n = self.normalise(x)
        if gamma is None:
            return n
        n, rows = self.unfold(n), self.rows_each(x)
        positions = self.positions(n, gamma.shape[1:])
        if rows > 1:  # rows per example
            n, positions = n.unflatten(1, (-1, rows)), [2, *(axis + 1 for axis in positions)]
        variance = self.variance("weight")
        if variance is not None and not positions:
            n = n.to(gamma.dtype)
            y = _scaled(n, gamma.unsqueeze(1), _spread(self.mean("bias"), [1]))
            spread = _scaled(n.square(), variance.unsqueeze(1), _spread(self.variance("bias"), [1]))
            return self.draw(y.flatten(0, 1), spread.flatten(0, 1))
        scale, shift = (_spread(self.drawn(key, n.shape[1]), positions) for key in ("weight", "bias"))
        assert scale is not None
        return _scaled(n, scale.to(n.dtype), None if shift is None else shift.to(n.dtype)).view_as(x)

    def example_gradient(self, parameter: str, x: Tensor, delta: Tensor) -> Tensor:
        gradient = delta
        if parameter == "weight":
            gradient = delta * self.normalise(x.flatten(0, 1)).view_as(delta)
        positions = self.positions(x, self.weights.mean[self.names[parameter]].shape[1:])
        return gradient.sum(positions) if positions else gradient


def _scaled(n: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    return n * scale if shift is None else torch.addcmul(shift, n, scale)


def _like(x: Tensor, weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.to(x.dtype)


def _spread(weight: Tensor | None, positions: list[int]) -> Tensor | None:
    """[R, B, *shape] with an axis of length 1 inserted for each position axis."""
    for axis in positions:
        weight = None if weight is None else weight.unsqueeze(axis)
    return weight


class LayerNorm(Norm):
    """nn.LayerNorm, whose weights extend along the last axes."""

    def __init__(self, layer: nn.LayerNorm | nn.RMSNorm) -> None:
        super().__init__(layer)
        self.shape, self.eps = list(layer.normalized_shape), layer.eps

    def positions(self, x: Tensor, shape: torch.Size) -> list[int]:
        return list(range(2, x.dim() - len(shape)))

    def normalise(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        assert self.eps is not None
        return F.layer_norm(x, self.shape, _like(x, scale), _like(x, shift), self.eps)


class RMSNorm(LayerNorm):
    """nn.RMSNorm"""

    def normalise(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        return F.rms_norm(x, self.shape, _like(x, scale), self.eps)


class GroupNorm(Norm):
    """nn.GroupNorm"""

    def __init__(self, layer: nn.GroupNorm) -> None:
        super().__init__(layer)
        self.groups, self.eps = layer.num_groups, layer.eps

    def normalise(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        return F.group_norm(x, self.groups, _like(x, scale), _like(x, shift), self.eps)


class BatchNorm(Norm):
    """nn.BatchNorm1d, 2d and 3d, with separate statistics for each replica.

    The running statistics are measured while the first task is learned, when n(x) uses the statistics of the batch.
    They are fixed from then on, in training too. What earlier tasks learned depends on them, and no prior or penalty
    protects them: if they moved, the network would forget without any change of a weight. A plain layer that has
    already seen batches (a pretrained network) keeps its statistics from the start; to measure them again, call
    `reset_running_stats()` on it first.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, layer: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> None:
        super().__init__(layer)
        if layer.running_mean is None:
            raise EvclError(
                "a BatchNorm without running statistics makes an example's prediction depend on its batch: "
                "use track_running_stats=True, or another norm"
            )
        self.eps, self.momentum, self.open = layer.eps, layer.momentum, False
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(layer, name).detach().clone().unsqueeze(0), persistent=False)

    def begin(self) -> None:
        """If the statistics were never measured, measure them in this task, in new buffers: the task may be undone."""
        self.open = not bool(self.num_batches_tracked.any())
        if self.open:
            for name, buffer in list(self.named_buffers(recurse=False)):
                setattr(self, name, buffer.clone())

    def normalise(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        """Normalise with replicas as channels: [B, R*c, ...]."""
        r = self.weights.replicas
        rows = self.weights.rows
        mean, variance = (t if rows is None else t[rows] for t in (self.running_mean, self.running_var))
        mean, variance = mean.flatten(), variance.flatten()
        flat = x if r == 1 else self.unfold(x).transpose(0, 1).flatten(1, 2)
        values = flat.numel() // flat.shape[1]
        viewed = rows is None or isinstance(rows, slice)  # so that an update in place reaches the buffers
        measures = self.open and viewed and self.weights.noise is not None
        if measures and values > 1:  # a single value has no variance
            y = self._measure(flat, mean, variance, scale, shift)
        else:
            y = F.batch_norm(flat, mean, variance, scale, shift, eps=self.eps)
        return y if r == 1 else y.unflatten(1, (r, -1)).transpose(0, 1).flatten(0, 1)

    def _measure(self, x: Tensor, mean: Tensor, variance: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
        """Normalise by the batch's statistics, and update the running statistics, which are views of the buffers."""
        rows = self.weights.rows
        tracked = self.num_batches_tracked if rows is None else self.num_batches_tracked[rows]
        tracked += 1
        if self.momentum is not None:
            return F.batch_norm(x, mean, variance, scale, shift, True, self.momentum, self.eps)
        batch = torch.zeros_like(mean), torch.zeros_like(variance)
        y = F.batch_norm(x, *batch, scale, shift, training=True, momentum=1.0, eps=self.eps)
        share = 1 / tracked[0].to(mean)  # weight of this batch in the mean over all batches
        mean.lerp_(batch[0], share)
        variance.lerp_(batch[1], share)
        return y
