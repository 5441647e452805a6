"""Readers of weights, and the tokeniser."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch

from evcl._core.errors import EvclError
from evcl.data.weights import read_safetensors, read_torch
from evcl.data.wordpiece import WordPiece


def packed(content: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(content), np.uint8)


def test_safetensors_are_read_and_every_damaged_file_is_refused_in_one_line():
    tensors = {"a": torch.ones(4), "b": torch.tensor([1.5, 2.0]).bfloat16(), "c": torch.zeros(0, 3)}
    whole = safetensors.torch.save(tensors, {"about": "text"})
    found = read_safetensors(packed(whole))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    damaged = [whole[:end] for end in range(len(whole))] + [whole + b"0", whole.replace(b"BF16", b"CODE")]
    for content in damaged:
        with pytest.raises(EvclError, match="not a safetensors file") as error:
            read_safetensors(packed(content))
        assert "\n" not in str(error.value)


def test_torch_files_are_read_without_running_code():
    out = io.BytesIO()
    torch.save({"a": torch.ones(2)}, out)
    assert torch.equal(read_torch(packed(out.getvalue()))["a"], torch.ones(2))

    class Bomb:
        def __reduce__(self):
            return exec, ("raise SystemExit('it ran')",)

    for bad in (pickle.dumps(Bomb(), 2), b"", b"nothing", out.getvalue()[:100]):
        with pytest.raises(EvclError, match="it is not a file of tensors"):
            read_torch(packed(bad))
    out = io.BytesIO()
    torch.save([1], out)
    with pytest.raises(EvclError, match="not a file of tensors by name"):
        read_torch(packed(out.getvalue()))


# --- the tokeniser ----------------------------------------------------------------------------------------------------

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##aff", "##able", "cafe", "a", ",", "!", "中", "##b", "b", "c"]


def tokens(text):
    return [WORDS[k] for k in WordPiece(WORDS).pieces(text)]


def test_words_are_cut_into_the_longest_pieces():
    assert tokens("Unaffable, CAFÉ!") == ["un", "##aff", "##able", ",", "cafe", "!"]
    assert tokens("unaffX a") == ["[UNK]", "a"]  # a word is known whole, or not at all
    assert tokens("a" * 101) == ["[UNK]"]
    assert tokens("a中b") == ["a", "中", "b"]
    assert tokens("a\u200bb a\tb\u00a0c\x00 \ufffd\x1c") == ["a", "##b", "a", "b", "c"]
    assert tokens("[CLS]") == ["[UNK]", "[UNK]", "[UNK]"]  # in a text, it is text


def test_rows_begin_and_end_with_their_marks_and_are_padded():
    rows = WordPiece(WORDS)(["a b", "", "a a a a a a a a"], length=6)
    assert rows.tolist() == [[2, 8, 13, 3, 0, 0], [2, 3, 0, 0, 0, 0], [2, 8, 8, 8, 8, 3]]
    assert rows.dtype == torch.float32
    assert WordPiece(WORDS)([], 5).shape == (0, 5)
    long = "\u200b" * 500 + "a b c"  # characters that vanish do not count
    assert WordPiece(WORDS)([long], 5).tolist() == [[2, 8, 13, 14, 3]]


def test_a_vocabulary_must_have_the_special_pieces():
    with pytest.raises(EvclError, match=r"has no \[CLS\]"):
        WordPiece(["[PAD]", "[UNK]"])
    with pytest.raises(EvclError, match="must begin with"):
        WordPiece(WORDS[::-1])
    with pytest.raises(EvclError, match="length must be at least 2"):
        WordPiece(WORDS)(["a"], 1)
    assert WordPiece.from_bytes("\n".join(WORDS).encode() + b"\n").numbers["c"] == 14
