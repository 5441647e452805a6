"""scikit-learn's handwritten digits: they come with that package, so nothing has to be downloaded."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from evcl._core.errors import extra

Array = NDArray[np.uint8]


@cache
def digits() -> tuple[Array, Array]:
    """1,797 images of 8 x 8 pixels from 0 to 16, and their labels 0 to 9."""
    with extra("data", "the embedded digits come with scikit-learn"):
        from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return images.astype(np.uint8), labels.astype(np.uint8)
