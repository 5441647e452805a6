"""The energy of a language model: the cross-entropy of each next token."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from evcl._core.errors import EvclError
from evcl.targets.energy import Energy


class NextToken(Energy):
    """-sum_t log p(x_t | x_1, ..., x_{t-1}), for t from 2 on, of sequences of tokens x [M, T].

    The network gives [M, (T - 1) x V]: the logits of V tokens at each position but the last, from which nothing
    follows. Those at position t may depend on x_1, ..., x_t only.

    `vocabulary` is V. If it is given, outputs of another width are refused; otherwise V is the width / (T - 1). Give it
    if your network could also have logits at the last position: T x V may be a multiple of T - 1, too.
    """

    def __init__(self, vocabulary: int | None = None) -> None:
        super().__init__()
        self.name, self.vocabulary = "next-token", vocabulary

    def nll(self, outputs: Tensor, y: Tensor, columns: Tensor | None = None) -> Tensor:
        logits, tokens = self.softmaxes(outputs, y)
        each = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
        return each.view(len(y), -1).sum(1)

    def softmaxes(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The logits [M, T - 1, V] of the next tokens, and these tokens [M, T - 1]."""
        length, width, tokens = y.shape[1], outputs.shape[1], self.vocabulary
        positions = length - 1
        if positions < 1:
            raise EvclError(f"a sequence must have at least 2 tokens, not {length}")
        if width % positions or (tokens is not None and width != positions * tokens):
            of = "" if tokens is None else f" of {tokens} tokens"
            raise EvclError(
                f"the network must give logits{of} for {positions} positions, all but the last, not {width} numbers"
            )
        return outputs.unflatten(1, (positions, -1)), y[:, 1:].long()
