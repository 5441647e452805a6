"""Small arrays in float64.

A row needs hundreds of operations on a few numbers each. numpy does one of these in about 1 us, torch in 3 to 8, and in
many times that where other programs share the processor's caches. What is large is left to torch: it uses as many
threads as torch may.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]
Values = NDArray[Any]
Json = dict[str, Any]  # what a file holds as text
NUMPY_NUMBERS = 2**16  # numbers that numpy changes faster than torch
NUMPY_PRODUCTS = 2**19  # multiplications per matrix that numpy does faster than torch
TINY = float(np.finfo(np.float64).tiny)


def joined(arrays: Sequence[Array]) -> Array:
    """One after the other, along the first axis."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def transposed(a: Array) -> Array:
    return a.swapaxes(-1, -2)


def product(a: Array, b: Array) -> Array:
    """a @ b, where b may be large."""
    if a.shape[-2] * a.shape[-1] * b.shape[-1] < NUMPY_PRODUCTS:
        return a @ b
    return _array(torch.from_numpy(a) @ torch.from_numpy(b))


def less_squares(matrices: Array, rows: Array) -> None:
    """matrices [N, P, P] - rows' rows, in place; rows [N, m, P]."""
    if matrices.size < NUMPY_NUMBERS:
        matrices -= transposed(rows) @ rows
        return
    own = torch.from_numpy(rows)
    torch.from_numpy(matrices).baddbmm_(own.mT, own, alpha=-1)


def inverse_root(matrices: Array) -> tuple[Array, NDArray[np.bool_]]:
    """G [N, m, m] with G' G = M^-1 for symmetric matrices M [N, m, m], and which of these are not positive [N]."""
    if matrices.shape[1] < 16:
        try:
            return np.linalg.inv(np.linalg.cholesky(matrices)), np.zeros(len(matrices), dtype=bool)
        except np.linalg.LinAlgError:
            pass  # torch says which
    factor, failed = torch.linalg.cholesky_ex(torch.from_numpy(matrices))
    one = torch.eye(matrices.shape[1], dtype=torch.float64).expand_as(factor)
    return _array(torch.linalg.solve_triangular(factor, one, upper=False)), failed.numpy() != 0


def eigenvectors(matrices: Array) -> Array:
    """Those of symmetric matrices [N, m, m], as columns, in ascending order of the eigenvalues."""
    return _array(torch.linalg.eigh(torch.from_numpy(matrices)).eigenvectors)


def diagonals(matrices: Array) -> Array:
    """[..., P]: the diagonals of matrices [..., P, P], which can be written to."""
    diagonal: Array = matrices.diagonal(0, -2, -1)
    diagonal.flags.writeable = matrices.flags.writeable
    return diagonal


def even(matrices: Array) -> None:
    """Make matrices [..., P, P] symmetric, in place: the mean of each and its transpose."""
    matrices += transposed(matrices).copy()
    matrices *= 0.5


def diagonal_matrices(diagonals_: Array) -> Array:
    """[..., P, P], from the diagonals [..., P]."""
    matrices = np.zeros((*diagonals_.shape, diagonals_.shape[-1]))
    diagonals(matrices)[...] = diagonals_
    return matrices


def sigmoid(z: Array) -> Array:
    """1 / (1 + exp(-z)), without an overflow."""
    p: Array = np.exp(log_sigmoid(z))
    return p


def log_sigmoid(z: Array) -> Array:
    log_p: Array = -np.logaddexp(0.0, -z)
    return log_p


def total(a: Array, axis: int = -1) -> Array:
    """The sum over an axis; less overhead than `a.sum`."""
    sums: Array = np.add.reduce(a, axis)
    return sums


def log(p: Array, least: float = TINY) -> Array:
    """The log of probabilities, none of which counts as less than this."""
    logs: Array = np.log(np.maximum(p, least))
    return logs


def finite(a: Array) -> bool:
    """Whether all are finite; False also where their sum is too large."""
    return math.isfinite(np.add.reduce(a, None))


def within(a: Array, low: Array | float, high: Array | float) -> Array:
    """a, cut at these ends; less overhead than `np.clip`."""
    clipped: Array = np.minimum(np.maximum(a, low), high)
    return clipped


def _array(tensor: torch.Tensor) -> Array:
    array: Array = tensor.numpy()
    return array


class Stateful:
    """An object whose state is in its attributes `names`, which are arrays or numbers, and in its `parts`."""

    names: tuple[str, ...] = ()

    def parts(self) -> Mapping[str, Stateful]:
        """The objects that it consists of; in the state, each one's names stand below its own."""
        return {}

    def arrays(self) -> dict[str, Array]:
        """Everything that rows change, by name."""
        arrays = {name: np.asarray(getattr(self, name)) for name in self.names}
        for prefix, part in self.parts().items():
            arrays |= {f"{prefix}/{name}": array for name, array in part.arrays().items()}
        return arrays

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """The inverse of `arrays`."""
        for name in self.names:
            is_array = isinstance(getattr(self, name), np.ndarray)
            setattr(self, name, arrays[name] if is_array else arrays[name].tolist())
        for prefix, part in self.parts().items():
            start = f"{prefix}/"
            part.restore({name.removeprefix(start): a for name, a in arrays.items() if name.startswith(start)})
