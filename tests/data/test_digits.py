"""The digits are read from scikit-learn's file, without importing scikit-learn."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from evcl._core.errors import MissingExtra
from evcl.data.embedded import digits


@pytest.mark.parametrize("file", ["where it is today", "elsewhere"])
def test_they_are_scikit_learns(file, monkeypatch):
    from sklearn.datasets import load_digits

    wanted, labels = load_digits(return_X_y=True)
    if file == "elsewhere":
        monkeypatch.setattr(Path, "is_file", lambda path: False)
    images, found = digits.__wrapped__()
    assert (images.dtype, found.dtype) == (np.uint8, np.uint8)
    assert np.array_equal(images, wanted)
    assert np.array_equal(found, labels)


def test_without_scikit_learn_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingExtra, match=r"the embedded digits come with scikit-learn: pip install 'evcl\[data\]'"):
        digits.__wrapped__()
