"""The energy of a language model: the cross-entropy of each next token."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from evcl._core.errors import EvclError
from evcl.likelihoods.energy import Energy


class NextToken(Energy):
    """-sum_t log p(x_t | x_1, ..., x_{t-1}), for t from 2 on, of sequences of tokens x [M, T].

    The network gives [M, T x V] or, if it leaves out the last position, [M, (T - 1) x V]: the logits of V tokens at
    each position, of which those at position t may depend on x_1, ..., x_t only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name = "next-token"

    def nll(self, outputs: Tensor, y: Tensor, columns: Tensor | None = None) -> Tensor:
        count = y.shape[1]
        positions = next((n for n in (count - 1, count) if n and outputs.shape[1] % n == 0), 0)
        if not positions:
            raise EvclError(f"the network must give logits for {count - 1} positions, not {outputs.shape[1]} numbers")
        logits = outputs.view(len(outputs), positions, -1)[:, : count - 1]
        each = F.cross_entropy(logits.flatten(0, 1), y[:, 1:].reshape(-1).long(), reduction="none")
        return each.view(len(y), -1).sum(1)
