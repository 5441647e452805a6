"""WordPiece, the tokeniser of BERT and its relatives (Devlin et al., 2019), for uncased English models.

It is that of the package `tokenizers`, made from the vocabulary alone: the name of a special piece in a text, such as
[MASK], is read as text. A character that is younger than the Unicode tables of that package counts as a letter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from evcl._core.errors import EvclError, extra

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


class WordPiece:
    """Turns texts into numbers of pieces."""

    def __init__(self, vocabulary: Sequence[str]) -> None:
        with extra("text", "texts need the package tokenizers"):
            from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

        self.numbers = {piece: k for k, piece in enumerate(vocabulary)}
        missing = [piece for piece in SPECIAL if piece not in self.numbers]
        if missing:
            raise EvclError(f"the vocabulary has no {missing[0]}")
        if self.numbers["[PAD]"] != 0:
            raise EvclError("the vocabulary must begin with [PAD], whose number is 0")
        self._tokenizer = Tokenizer(models.WordPiece(self.numbers, unk_token="[UNK]", max_input_chars_per_word=100))
        self._tokenizer.normalizer = normalizers.BertNormalizer()
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    @classmethod
    def from_bytes(cls, content: bytes) -> WordPiece:
        """From a file `vocab.txt`, one piece per line."""
        return cls(content.decode("utf-8").rstrip("\n").split("\n"))

    def pieces(self, text: str) -> list[int]:
        """The numbers of a text's pieces, without [CLS] and [SEP]."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def __call__(self, texts: Iterable[str], length: int = 128) -> Tensor:
        """[N, length]: numbers of pieces as floats, with [CLS] first and [SEP] last, then 0. A text that is too long is
        cut off.
        """
        if length < 2:
            raise EvclError(f"length must be at least 2, not {length}: [CLS] and [SEP] need two places")
        rows = torch.zeros(len(texts := list(texts)), length)
        for row, text in zip(rows, texts, strict=True):
            pieces = [self.numbers["[CLS]"], *self.pieces(text)[: length - 2], self.numbers["[SEP]"]]
            row[: len(pieces)] = torch.tensor(pieces, dtype=torch.float32)
        return rows
