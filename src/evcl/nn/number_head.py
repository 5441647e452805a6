"""The head of targets that are numbers: beside its outputs, it holds numbers that training measures.

They are state beside the weights, like the running statistics of a batch norm: saved, loaded, moved and restored with
the run. For a Gaussian they are the log of the noise variance of each output, for counts the log of the usual count.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evcl.nn.layers import Linear

MIN_NOISE_VARIANCE = 1e-5  # the smallest noise variance, relative to that of the targets


class NumberHead(Linear):
    """A linear layer with `beside` [R, D], and `earlier` [R, 2, D]: the noise after earlier tasks, and their rows."""

    beside: Tensor
    earlier: Tensor

    def __init__(self, k: int, outputs: int, like: Tensor) -> None:
        super().__init__(nn.Identity())
        self.path = f"head {k}"
        shape = (len(like), outputs)
        self.least: Tensor | None = None  # [D]: what the numbers beside the outputs are at least, when a fit begins
        self.register_buffer("beside", like.new_zeros(shape), persistent=False)
        self.register_buffer("earlier", like.new_zeros(len(like), 2, outputs), persistent=False)

    def begin(self) -> None:
        """A fit begins: it changes copies, so that it can be undone."""
        self.beside = self.beside.clone() if self.least is None else torch.maximum(self.beside, self.least)
        self.least = None

    def with_beside(self, outputs: Tensor) -> Tensor:
        """[R*B, 2 D]: the outputs [R*B, D], and the numbers beside them."""
        r = self.weights.replicas
        wide = self.beside.to(outputs).unsqueeze(1).expand(-1, len(outputs) // r, -1)
        return torch.cat([outputs, wide.reshape(outputs.shape)], 1)

    @torch.no_grad()
    def follow(self, error: Tensor, rows: int, rate: float) -> None:
        """Move the noise by a fraction `rate` towards that of a task of this many rows with the mean squared error
        [R, D] (see targets/numbers.py); in place, and NaN changes nothing.
        """
        noise, before = self.earlier[:, 0], self.earlier[:, 1]
        wanted = (before * noise + rows * error) / (before + rows)
        now = self.beside.exp()
        self.beside.copy_((now + rate * (wanted - now).nan_to_num(0.0)).clamp_min(MIN_NOISE_VARIANCE).log())

    @torch.no_grad()
    def count(self, rows: int) -> None:
        """A task of this many rows has ended."""
        self.earlier = torch.stack([self.beside.exp(), self.earlier[:, 1] + rows], 1)

    @torch.no_grad()
    def rescale(self, factor: Tensor) -> None:
        """The outputs are from now on `factor` [D] times as large: so are the errors."""
        self.beside = self.beside + 2 * factor.log()
        self.earlier = torch.stack([self.earlier[:, 0] * factor.square(), self.earlier[:, 1]], 1)
