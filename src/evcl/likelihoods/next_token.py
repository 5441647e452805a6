"""The energy of a language model: the cross-entropy of each next token."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from evcl._core.errors import EvclError
from evcl.likelihoods.energy import Energy


class NextToken(Energy):
    """-sum_t log p(x_t | x_1, ..., x_{t-1}), for t from 2 on, of sequences of tokens x [M, T].

    The network gives [M, (T - 1) x V]: the logits of V tokens at each position but the last, from which nothing
    follows. Those at position t may depend on x_1, ..., x_t only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name = "next-token"

    def nll(self, outputs: Tensor, y: Tensor, columns: Tensor | None = None) -> Tensor:
        positions, width = y.shape[1] - 1, outputs.shape[1]
        if positions < 1:
            raise EvclError(f"a sequence must have at least 2 tokens, not {y.shape[1]}")
        if width % positions:
            raise EvclError(
                f"the network must give logits for {positions} positions, all but the last, not {width} numbers"
            )
        logits = outputs.view(len(outputs) * positions, -1)
        each = F.cross_entropy(logits, y[:, 1:].reshape(-1).long(), reduction="none")
        return each.view(len(y), -1).sum(1)
