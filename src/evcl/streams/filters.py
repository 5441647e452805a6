"""Kalman filters on the weights of R networks side by side, which differ in how they store the posterior's covariance.

A filter has the mean [R, P] and the covariance S of the weights *before* the next rows. The outputs of n rows with K
outputs each are linear in the weights near the mean, f + J (theta - mean), with J [R, n, K, P]; m = n K. The likelihood
gives the residual e = d log p / d f and a root B of the curvature, B B' = -d^2 log p / d f^2, both at the prediction:

    V = J S J',   theta = mean + S J' a,   a = e - B (I + B' V B)^-1 B' V e,   S <- S - S J' B (I + B' V B)^-1 B' J S

This is the extended Kalman filter without an inverse of the noise, which classes do not have. If the rows are
linearised again at a new theta, the update still starts from `mean` and S, so that no row counts twice:
e <- e + B B' J (theta - mean).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from evcl.streams.arrays import (
    Array,
    Stateful,
    diagonals,
    eigenvectors,
    even,
    inverse_root,
    less_squares,
    product,
    total,
    transposed,
)
from evcl.streams.jacobian import Network, Perceptron


class Linearisation(Protocol):
    """What rows have to do with the weights. `variance` [R, m, m] is V = J S J'."""

    variance: Array

    def along(self, a: Array) -> Array:
        """[R, P]: S J' a, for a [R, n, K]."""
        ...

    def change(self, weights: Array) -> Array:
        """[R, n, K]: J times a change of the weights [R, P]."""
        ...


class Dense:
    """The reach of rows by J [R, n, K, P] and J S [R, m, P]."""

    def __init__(self, jacobian: Array, spread: Array) -> None:
        self.jacobian, self.spread = jacobian, spread
        self.variance = product(spread, transposed(jacobian.reshape(spread.shape)))

    def along(self, a: Array) -> Array:
        return (a.reshape(len(a), 1, -1) @ self.spread)[:, 0]

    def change(self, weights: Array) -> Array:
        return (self.jacobian @ weights[:, None, :, None])[..., 0]


WAITING_ROWS = 32  # rows that a filter keeps apart from its covariance
SMALL_COVARIANCE = 1000  # numbers in covariances for which nothing waits
MAX_SCALE = 2.0  # a scale from which on it becomes part of the covariance


class Filter(Stateful):
    """The weights of R networks: `mean` [R, P], and a covariance. `prior` [P] are the variances before any row, which
    forgetting does not exceed. What has R rows is in the attributes `names`.
    """

    names: tuple[str, ...] = ("mean",)

    def __init__(self, network: Network, mean: Array, prior: Array) -> None:
        self.network, self.mean, self.prior = network, mean.copy(), prior.copy()

    def look(self, weights: Array, x: Array) -> tuple[Array, Linearisation]:
        """The outputs [R, n, K] at these weights [R, P] for inputs x [n, ...], and the reach of these rows."""
        f, jacobian = self.network.jacobian(weights, x)
        r, n, k, size = jacobian.shape
        return f, Dense(jacobian, self.spread(jacobian.reshape(r, n * k, size)))

    def spread(self, jacobian: Array) -> Array:
        """[R, m, P]: J S, for J [R, m, P]."""
        raise NotImplementedError

    def shrink(self, found: Any, b: Array, root: Array) -> None:
        """Learn the covariance, from what `look` found, B [R, n, K, K] and G [R, m, m], G' G = (I + B' V B)^-1."""
        raise NotImplementedError

    def forget(self, kept: Array) -> None:
        """Keep this part [R] of what is known, from 0 to 1."""
        raise NotImplementedError

    def grow(self, mean: Array, prior: Array) -> None:
        """Append the weights of outputs, one after another, independent of the others: means and variances [p]."""
        self.mean = wider(self.mean, mean)
        self.prior = np.concatenate([self.prior, prior])

    def reset(self, targets: NDArray[np.bool_], mean: Array) -> None:
        """These networks [R] know nothing again: their weights are N(mean, prior)."""
        self.mean[targets] = mean

    def copy(self, target: int, source: int) -> None:
        """Network `target` becomes a copy of network `source`."""
        for name in self.names:
            array = getattr(self, name)
            array[target] = array[source]


def wider(a: Array, columns: Array) -> Array:
    """a [R, P] with the same further columns [p] in every row."""
    return np.concatenate([a, np.broadcast_to(columns, (len(a), len(columns)))], 1)


class Full(Filter):
    """The whole covariance, S = D (C - U' U) D with C [R, P, P], the first `used` rows of U [R, WAITING, P], and the
    diagonal D, `scale` [R, P].

    To write all of C takes longer than all else. So what single rows teach waits in U until the filter forgets, and to
    forget changes D and the diagonal of C alone.
    """

    names = ("mean", "covariance", "waiting", "scale")

    def __init__(self, network: Network, mean: Array, prior: Array) -> None:
        super().__init__(network, mean, prior)
        self.covariance = np.stack([np.diag(prior)] * len(mean))
        self.waiting, self.used = np.zeros((len(mean), WAITING_ROWS, len(prior))), 0
        self.scale = np.ones(mean.shape)

    def look(self, weights: Array, x: Array) -> tuple[Array, Linearisation]:
        if len(x) > 1 or not isinstance(self.network, Perceptron):
            return super().look(weights, x)
        f, layers, a = self.network.backward(weights, x)
        jacobian = self.network.dense(f.shape[2], layers, a)
        if f.shape[2] < 2:
            return f, Dense(jacobian, self.spread(jacobian[:, 0]))
        spread = self.network.times(layers, a, self.scale, self.covariance)
        return f, Dense(jacobian, self._less(jacobian[:, 0] * self.scale[:, None], spread))

    def spread(self, jacobian: Array) -> Array:
        scaled = jacobian * self.scale[:, None]
        return self._less(scaled, product(scaled, self.covariance))

    def _less(self, scaled: Array, spread: Array) -> Array:
        """J S, from J D and J D C."""
        if self.used:
            waiting = self.waiting[:, : self.used]
            spread -= product(product(scaled, transposed(waiting)), waiting)
        spread *= self.scale[:, None]
        return spread

    def shrink(self, found: Dense, b: Array, root: Array) -> None:
        rows = product(root, rooted(b, found.spread))
        rows /= self.scale[:, None]
        more = rows.shape[1]
        if self.used + more > WAITING_ROWS:
            self._settle()
        if found.jacobian.shape[1] > 1 or more > WAITING_ROWS or self.covariance.size < SMALL_COVARIANCE:
            less_squares(self.covariance, rows)
            return
        self.waiting[:, self.used : self.used + more] = rows
        self.used += more

    def block(self, place: slice) -> Array:
        """[R, size, size]: the covariance of some of the weights."""
        waiting, scale = self.waiting[:, : self.used, place], self.scale[:, place]
        inner = self.covariance[:, place, place] - transposed(waiting) @ waiting
        return scale[:, :, None] * inner * scale[:, None]

    def _settle(self) -> None:
        """Write what waits to the covariance."""
        if self.used:
            less_squares(self.covariance, self.waiting[:, : self.used])
            self.used = 0

    def forget(self, kept: Array) -> None:
        self._settle()
        self.scale /= np.sqrt(kept)[:, None]
        own, squares = diagonals(self.covariance), self.scale * self.scale
        if (down := too_wide(own * squares, self.prior)) is not None:
            self.scale *= down
            squares = self.scale * self.scale
        own += MIN_ADDED_VARIANCE * (1 - kept)[:, None] * self.prior / squares
        for r in np.flatnonzero(self.scale.max(1, initial=0.0) > MAX_SCALE):
            self._rescale(int(r))

    def _rescale(self, r: int) -> None:
        """Make the scale of network r part of its covariance. What rounding has made lopsided is evened out: forgetting
        would amplify it.
        """
        covariance, scale = self.covariance[r], self.scale[r]
        covariance *= scale
        covariance *= scale[:, None]
        even(covariance)
        scale[:] = 1

    def grow(self, mean: Array, prior: Array) -> None:
        self._settle()
        size = len(self.prior)
        super().grow(mean, prior)
        wide = np.stack([np.diag(self.prior)] * len(self.mean))
        wide[:, :size, :size] = self.covariance
        self.covariance, self.waiting = wide, np.zeros((len(self.mean), WAITING_ROWS, len(self.prior)))
        self.scale = wider(self.scale, np.ones(len(prior)))

    def reset(self, targets: NDArray[np.bool_], mean: Array) -> None:
        self._settle()
        super().reset(targets, mean)
        self.covariance[targets], self.scale[targets] = np.diag(self.prior), 1.0
        self.waiting[targets] = 0  # it is saved, and may hold what made the network fail

    def arrays(self) -> dict[str, Array]:
        return {**super().arrays(), "used": np.array(self.used)}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        super().restore(arrays)
        self.used = min(max(int(arrays["used"]), 0), WAITING_ROWS)


MAX_VARIANCE_RATIO = 1.1  # a variance may exceed the prior's by this factor before it is cut back
MIN_ADDED_VARIANCE = 1e-3  # of the prior's variance, added by forgetting everything; keeps covariances well conditioned


def too_wide(variance: Array, prior: Array) -> Array | None:
    """The factors by which to scale down rows and columns whose variances [R, ...] exceed the prior's [...]; None as
    long as none exceeds it clearly.
    """
    if not (variance > MAX_VARIANCE_RATIO * prior).any():
        return None
    factors: Array = np.minimum(np.sqrt(prior / np.maximum(variance, 1e-300)), 1.0)
    return factors


def inflate(covariance: Array, prior: Array, kept: Array) -> None:
    """Divide covariance [R, ..., size, size] by kept [R], in place. Where a variance would exceed the prior's
    [..., size], its row and column are scaled down. What rounding has made lopsided is evened out.
    """
    part = kept.reshape(-1, *[1] * (covariance.ndim - 1))
    even(covariance)
    covariance /= part
    own = diagonals(covariance)
    if (down := too_wide(own, prior)) is not None:
        covariance *= down[..., None]
        covariance *= down[..., None, :]
    own += MIN_ADDED_VARIANCE * (1 - part[..., 0]) * prior


class Diagonal(Filter):
    """Independent weights: 1 / v <- 1 / v + (B' J)^2, summed over the rows."""

    names = ("mean", "variance")

    def __init__(self, network: Network, mean: Array, prior: Array) -> None:
        super().__init__(network, mean, prior)
        self.variance = np.stack([prior] * len(mean))

    def spread(self, jacobian: Array) -> Array:
        return jacobian * self.variance[:, None]

    def shrink(self, found: Dense, b: Array, root: Array) -> None:
        self.variance /= 1 + self.variance * ((transposed(b) @ found.jacobian) ** 2).sum((1, 2))

    def forget(self, kept: Array) -> None:
        self.variance = np.minimum(self.variance / kept[:, None], self.prior)

    def grow(self, mean: Array, prior: Array) -> None:
        super().grow(mean, prior)
        self.variance = wider(self.variance, prior)

    def reset(self, targets: NDArray[np.bool_], mean: Array) -> None:
        super().reset(targets, mean)
        self.variance[targets] = self.prior


class Window(Diagonal):
    """MESU (Bonnet et al., 2025): independent weights that remember a window of rows.

    With C the NLL of the rows, sigma the deviations and N(m_0, s_0^2) the prior, a batch moves the weights by

        d mu    = -sigma^2 dC/dmu + sigma^2 (m_0 - mu) / (w s_0^2)
        d sigma = -sigma^2 / 2 dC/dsigma + sigma (s_0^2 - sigma^2) / (2 w s_0^2)

    for a window of w batches. Here the window is counted in rows, and dC/dsigma = sigma F with the Fisher's diagonal F.
    The first part of d sigma is applied as sigma <- sigma / sqrt(1 + sigma^2 F). To first order in F this is the same,
    and it stays above 0 for any F. The first part of d mu is the filter's update of the mean.

    `forget(kept)` with kept = 1 - rows / w moves mu and sigma towards the prior, `centre` [P] and `prior` [P].
    """

    def __init__(self, network: Network, mean: Array, prior: Array) -> None:
        super().__init__(network, mean, prior)
        self.centre = mean[0].copy()

    def forget(self, kept: Array) -> None:
        part = (1 - kept)[:, None] / self.prior
        less = self.variance * part  # sigma^2 / (w s_0^2)
        self.mean = self.mean + less * (self.centre - self.mean)
        std = np.sqrt(self.variance) * (1 + 0.5 * (part * self.prior - less))
        self.variance = np.minimum(std * std, self.prior)

    def grow(self, mean: Array, prior: Array) -> None:
        super().grow(mean, prior)
        self.centre = np.concatenate([self.centre, mean])


class LowRank(Filter):
    """The precision diag(u) + W' W with `rank` rows W (LO-FI: Chang et al., 2023). Rows B' J are appended to W, its
    leading singular vectors are kept, and the diagonal of the rest is added to u.
    """

    names = ("mean", "precision", "rows")

    def __init__(self, network: Network, mean: Array, prior: Array, rank: int) -> None:
        super().__init__(network, mean, prior)
        self.rank = rank
        self.precision = np.stack([1 / prior] * len(mean))
        self.rows = np.zeros((len(mean), rank, mean.shape[1]))

    def spread(self, jacobian: Array) -> Array:
        """By Woodbury's identity, J (diag(u) + W' W)^-1."""
        scaled = self.rows / self.precision[:, None]
        inner = product(scaled, transposed(self.rows))
        diagonals(inner)[...] += 1
        root, _ = inverse_root(inner)
        less = product(product(jacobian, transposed(scaled)), transposed(root))
        return jacobian / self.precision[:, None] - product(less, product(root, scaled))

    def shrink(self, found: Dense, b: Array, root: Array) -> None:
        more = (transposed(b) @ found.jacobian).reshape(found.spread.shape)
        every = np.concatenate([self.rows, more], 1)
        vectors = eigenvectors(product(every, transposed(every)))  # ascending
        kept = product(transposed(vectors[:, :, -self.rank :]), every)
        self.precision += np.maximum(total(every**2, 1) - total(kept**2, 1), 0)
        self.rows = kept

    def forget(self, kept: Array) -> None:
        """Both parts shrink towards the prior's precision."""
        part = kept[:, None]
        self.precision = part * self.precision + (1 - part) / self.prior
        self.rows = np.sqrt(part)[:, None] * self.rows

    def grow(self, mean: Array, prior: Array) -> None:
        super().grow(mean, prior)
        count = len(self.mean)
        self.precision = wider(self.precision, 1 / prior)
        self.rows = np.concatenate([self.rows, np.zeros((count, self.rank, len(prior)))], 2)

    def reset(self, targets: NDArray[np.bool_], mean: Array) -> None:
        super().reset(targets, mean)
        self.precision[targets], self.rows[targets] = 1 / self.prior, 0.0


def solved(variance: Array, e: Array, b: Array) -> tuple[Array, Array, NDArray[np.bool_]]:
    """a [R, n, K]; G [R, m, m] with G' G = (I + B' V B)^-1; and which networks [R] could not be computed, because their
    covariance has lost its precision. V [R, m, m], e [R, n, K], b [R, n, K, K].
    """
    r, n, k = e.shape
    if n * k == 1:  # the same in fewer steps
        inner = 1 + b[..., 0] ** 2 * variance
        return e / inner, 1 / np.sqrt(inner), ~(inner[:, 0, 0] > 0)
    half = rooted(b, variance)  # B' V
    inner = rooted(b, transposed(half))  # of which one half is used
    diagonals(inner)[...] += 1
    root, failed = inverse_root(inner)
    less = transposed(root) @ (root @ (half @ e.reshape(r, n * k, 1)))
    return e - (b @ less.reshape(r, n, k, 1))[..., 0], root, failed


def rooted(b: Array, rows: Array) -> Array:
    """B' rows, for B [R, n, K, K] and rows [R, n K, any]."""
    r, n, k, _ = b.shape
    if k == 1:
        return b[..., 0] * rows
    return (transposed(b) @ rows.reshape(r, n, k, -1)).reshape(r, n * k, -1)


def of_rows(variance: Array, n: int) -> Array:
    """[R, n, K, K]: the covariance of each row's outputs, from that of all rows [R, m, m]."""
    if n == 1:
        return variance[:, None]
    k = variance.shape[1] // n
    blocks: Array = np.einsum("rnknl->rnkl", variance.reshape(len(variance), n, k, n, k))
    return blocks
