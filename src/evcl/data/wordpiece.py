"""WordPiece, the tokeniser of BERT and its relatives (Devlin et al., 2019), for uncased English models.

A text is cleaned of control characters, put in lower case, and stripped of accents. It is split at white space and
around each punctuation mark and Chinese character. A word is then cut into the longest pieces that the vocabulary has,
from left to right; pieces within a word begin with `##`. A word that cannot be cut so is [UNK].

It is our own because the vocabulary is all that is needed: it gives the same numbers as the package `tokenizers`,
except that the name of a special piece in a text, such as [MASK], is read as text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from evcl._core.errors import EvclError

MOST_LETTERS = 100  # of a word; a longer one is [UNK]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
CONTROL = ("Cc", "Cf", "Co", "Cs")
CHINESE = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F)),
    *((0x2B920, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)


class WordPiece:
    """Turns texts into numbers of pieces."""

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self.numbers = {piece: k for k, piece in enumerate(vocabulary)}
        missing = [piece for piece in SPECIAL if piece not in self.numbers]
        if missing:
            raise EvclError(f"the vocabulary has no {missing[0]}")
        if self.numbers["[PAD]"] != 0:
            raise EvclError("the vocabulary must begin with [PAD], whose number is 0")
        self._pieces = lru_cache(maxsize=100_000)(self._cut)

    @classmethod
    def from_bytes(cls, content: bytes) -> WordPiece:
        """From a file `vocab.txt`, one piece per line."""
        return cls(content.decode("utf-8").rstrip("\n").split("\n"))

    def pieces(self, text: str) -> list[int]:
        """The numbers of a text's pieces, without [CLS] and [SEP]."""
        return [number for word in _words(text) for number in self._pieces(word)]

    def __call__(self, texts: Iterable[str], length: int = 128) -> Tensor:
        """[N, length]: numbers of pieces as floats, with [CLS] first and [SEP] last, then 0. A text that is too long is
        cut off.
        """
        if length < 2:
            raise EvclError(f"length must be at least 2, not {length}: [CLS] and [SEP] need two places")
        rows = [self._row(text, length) for text in texts]
        return torch.tensor(rows, dtype=torch.float32).view(-1, length)

    def _row(self, text: str, length: int) -> list[int]:
        first, last = self.numbers["[CLS]"], self.numbers["[SEP]"]
        # A piece has at least one character. Some vanish, so the start of a long text is tried before all of it.
        some = self.pieces(text[: 16 * length])
        found = (some if len(some) > length or len(text) <= 16 * length else self.pieces(text))[: length - 2]
        return [first, *found, last] + [0] * (length - 2 - len(found))

    def _cut(self, word: str) -> tuple[int, ...]:
        unknown = (self.numbers["[UNK]"],)
        if len(word) > MOST_LETTERS:
            return unknown
        found, start = [], 0
        while start < len(word):
            mark = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((end for end in ends if mark + word[start:end] in self.numbers), None)
            if end is None:
                return unknown
            found.append(self.numbers[mark + word[start:end]])
            start = end
        return tuple(found)


def _words(text: str) -> list[str]:
    clean = "".join(map(_cleaned, text))
    bare = "".join(c for c in unicodedata.normalize("NFD", clean) if unicodedata.category(c) != "Mn")
    return "".join(f" {c} " if _is_mark(c) else c for c in bare.lower()).split()


@lru_cache(maxsize=10_000)
def _cleaned(c: str) -> str:
    """The character, with spaces around a Chinese one; a space for white space; nothing for a control character."""
    if c in "\t\n\r":
        return " "
    if c == "\ufffd" or unicodedata.category(c) in CONTROL:  # before white space: some are both
        return ""
    if c.isspace():
        return " "
    number = ord(c)
    return f" {c} " if number >= 0x3400 and any(low <= number <= high for low, high in CHINESE) else c


@lru_cache(maxsize=10_000)
def _is_mark(c: str) -> bool:
    """Whether it is punctuation: for ASCII, everything that is no letter, digit or space."""
    number = ord(c)
    ascii_mark = 33 <= number <= 47 or 58 <= number <= 64 or 91 <= number <= 96 or 123 <= number <= 126
    return ascii_mark or unicodedata.category(c)[0] == "P"
