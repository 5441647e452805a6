"""scikit-learn's handwritten digits: they come with that package, so nothing has to be downloaded."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evcl._core.errors import missing

Array = NDArray[np.uint8]


@cache
def digits() -> tuple[Array, Array]:
    """1,797 images of 8 x 8 pixels from 0 to 16, and their labels 0 to 9.

    They are read from scikit-learn's file. The package itself is not imported, which takes two seconds, unless it has
    the file elsewhere.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise missing("data", "the embedded digits come with scikit-learn")
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        return images.astype(np.uint8), labels.astype(np.uint8)
    rows = np.loadtxt(path, np.uint8, delimiter=",")
    return rows[:, :-1].copy(), rows[:, -1].copy()
