"""Filters and networks beside slow references, in float64."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import evcl
from evcl.streams.arrays import Array, inverse_root, less_squares, product
from evcl.streams.experts import Experts
from evcl.streams.filters import Diagonal, Full, LowRank, Window, solved
from evcl.streams.jacobian import Module, Network, Perceptron, default, of
from evcl.streams.observing import Classes, Numbers
from evcl.streams.units import Units


def drawn(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape)


def linear(filter: type, memories: list[float], noise: float = 0.5, **options: int) -> Experts:
    """A linear model with one target whose noise is known."""
    observing = Numbers(len(memories), 1, noise)
    found = Experts([default(3, 0, 0)], lambda *given: filter(*given, **options), memories, observing)
    found.grow(1)
    return found


def classifier(network: Network, filter: type, memories: list[float], outputs: int = 1) -> Experts:
    found = Experts([network], filter, memories, Classes())
    found.grow(outputs)
    return found


def learned(experts: Experts, x: Array, y: Array, batch: int) -> None:
    for i in range(0, len(x), batch):
        experts.learn(experts.look(x[i : i + batch]), x[i : i + batch], y[i : i + batch], 1)


def wide(x: Array) -> Array:
    return np.concatenate([x, np.ones((len(x), 1))], 1)


def ridge(x: Array, y: Array, prior: Array, noise: float, weights: Array) -> tuple[Array, Array]:
    """The posterior of a linear model, at once; `weights` [n] of the rows."""
    precision = np.diag(1 / prior) + (wide(x) * weights[:, None]).T @ wide(x) / noise**2
    covariance = np.linalg.inv(precision)
    return covariance @ (wide(x) * weights[:, None]).T @ y[:, 0] / noise**2, covariance


@pytest.mark.parametrize(("filter", "options"), [(Full, {}), (Units, {}), (LowRank, {"rank": 4})])
@pytest.mark.parametrize("batch", [1, 7])
def test_a_linear_model_is_the_exact_posterior(filter: type, options: dict[str, int], batch: int) -> None:
    x = drawn(60, 3)
    y = x[:, :1] - 2 * x[:, 1:2] + 0.5 * drawn(60, 1, seed=1) + 1
    experts = linear(filter, [math.inf], **options)
    learned(experts, x, y, batch)
    own = experts.groups[0].filter
    mean, covariance = ridge(x, y, own.prior, 0.5, np.ones(60))
    assert np.abs(own.mean[0] - mean).max() < 1e-8
    new = drawn(5, 3, seed=2)
    f, _, w = np.split(experts.look(new).predicted, 3, 2)
    assert np.abs(f[0, :, 0] - wide(new) @ mean).max() < 1e-8
    assert np.abs(w[0, :, 0] - (wide(new) @ covariance * wide(new)).sum(1)).max() < 1e-8


def test_a_linear_model_that_forgets_weighs_earlier_rows_less() -> None:
    """In the precision, S / kept is an exponential window; the prior is far enough away not to matter here."""
    x, memory = drawn(400, 3), 50.0
    y = x[:, :1] + 0.5 * drawn(400, 1, seed=1)
    experts = linear(LowRank, [memory], rank=4)
    learned(experts, x, y, 8)
    ages = np.arange(400)[::-1] // 8 + 1
    kept = (1 - 1 / memory) ** (8 * ages)
    own = experts.groups[0].filter
    mean, covariance = ridge(x, y, own.prior, 0.5, kept)
    spread = own.look(own.mean, x[:9])[1].variance
    assert np.abs(np.diag(spread[0]) - (wide(x[:9]) @ covariance * wide(x[:9])).sum(1)).max() < 1e-3
    assert np.abs(own.mean[0] - mean).max() < 0.05


def test_independent_weights_learn_the_diagonal_of_the_precision() -> None:
    x, y = drawn(30, 3), drawn(30, 1, seed=1)
    experts = linear(Diagonal, [math.inf])
    experts.learn(experts.look(x), x, y, 1)
    own = experts.groups[0].filter
    wanted = 1 / (1 / own.prior + (wide(x) ** 2).sum(0) / 0.25)
    assert np.abs(own.variance[0] - wanted).max() < 1e-12  # type: ignore[attr-defined]


def test_mesu_moves_as_its_equations_say() -> None:
    found = Window(default(3, 0, 0), np.zeros((2, 4)), np.full(4, 0.5))
    found.mean += 0.3
    found.variance = np.full((2, 4), 0.1)
    window = np.array([100.0, 1000.0])
    found.forget(1 - 1 / window)
    sigma, w = math.sqrt(0.1), window[:, None]
    assert np.allclose(found.mean, 0.3 + 0.1 * (0 - 0.3) / (w * 0.5))
    assert np.allclose(np.sqrt(found.variance), sigma + sigma * (0.5 - 0.1) / (2 * w * 0.5))


def test_a_window_of_any_length_forgets_towards_the_prior() -> None:
    found = Window(default(3, 0, 0), np.zeros((1, 4)), np.full(4, 0.5))
    found.variance /= 100
    for _ in range(2000):
        found.forget(np.array([0.9]))
    assert np.allclose(found.variance, 0.5)


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize(
    ("widths", "activation", "skip"), [([4], "tanh", True), ([4, 5], "tanh", True), ([4, 5, 3], "relu", False)]
)
def test_derivatives_by_hand_are_those_of_autograd(
    widths: list[int], activation: str, skip: bool, outputs: int
) -> None:
    sizes = [(a + 1) * b for a, b in pairwise(widths)]
    network = Perceptron(widths, activation, skip, drawn(sum(sizes)))
    weights = drawn(2, sum(sizes) + outputs * len(network.row), seed=3)
    x = drawn(6, 4, seed=4)

    def outputs_of(flat: torch.Tensor) -> torch.Tensor:
        """The network, plainly."""
        inputs = a = z = wide_tensor(torch.from_numpy(x))
        for start, units, size in network.groups:
            z = a @ flat[start : start + units * size].view(units, size).T
            z = z.tanh() if activation == "tanh" else z.relu()
            a = wide_tensor(z)
        a = torch.cat([z, inputs], 1) if skip and network.groups else a
        return a @ flat[sum(sizes) :].view(outputs, -1).T

    f, found = network.jacobian(weights, x)
    for r in range(2):
        flat = torch.from_numpy(weights[r])
        assert np.abs(f[r] - outputs_of(flat).numpy()).max() < 1e-12
        assert np.abs(found[r] - torch.func.jacrev(outputs_of)(flat).numpy()).max() < 1e-12
    assert f.shape == (2, 6, outputs)


def wide_tensor(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x.new_ones(len(x), 1)], 1)


def test_an_mlp_is_the_same_by_hand_and_by_torch_func() -> None:
    network, x = evcl.nn.mlp(4, [5, 3]), drawn(6, 4)
    fast, slow = of(network, torch.from_numpy(x)), Module(network, torch.from_numpy(x))
    assert isinstance(fast, Perceptron)
    rows = drawn(2, 2 * len(fast.row), seed=1)
    given = np.concatenate([np.stack([fast.start] * 2), rows], 1)
    f, found = fast.jacobian(given, x)
    order = np.concatenate([_place(layer, network) for layer in network if isinstance(layer, nn.Linear)])
    order = np.concatenate([order, np.arange(len(order), given.shape[1])])
    g, other = slow.jacobian(given[:, order], x)
    assert np.abs(f - g).max() < 1e-12
    assert np.abs(found[..., order] - other).max() < 1e-12


def _place(layer: nn.Linear, network: nn.Module) -> Array:
    """Where the parameters of a layer, weight then bias, are among weights that have the bias of a unit beside it."""
    before = 0
    for one in network:  # type: ignore[attr-defined]
        if one is layer:
            break
        before += sum(p.numel() for p in one.parameters())
    units, fan_in = layer.weight.shape
    grid = before + np.arange(units * (fan_in + 1)).reshape(units, fan_in + 1)
    return np.concatenate([grid[:, :-1].flatten(), grid[:, -1]])


def blocks_of(*blocks: Array) -> Array:
    """A matrix with these along its diagonal."""
    return torch.block_diag(*map(torch.from_numpy, blocks)).numpy()


def covariance_of(filter: object, r: int) -> Array:
    """The whole covariance [P, P] of network r."""
    if isinstance(filter, Units):
        return blocks_of(*(block[r, u] for block in filter.blocks for u in range(block.shape[1])))
    assert isinstance(filter, Full)
    waiting = filter.waiting[r, : filter.used]
    scale = filter.scale[r]
    return scale[:, None] * (filter.covariance[r] - waiting.T @ waiting) * scale


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("filter", [Full, Units])
def test_filters_are_the_equations_with_the_whole_jacobian(filter: type, outputs: int, rows: int) -> None:
    """Several steps of two groups at once, beside the plain equations of the filter for one network at a time."""
    networks = [default(4, 6, 0), default(4, 0, 0)]
    fast = Experts(networks, filter, [math.inf, 100.0], Classes())
    fast.grow(outputs)
    fast.waiting = -(10**6)  # nothing is forgotten
    for group in fast.groups:
        group.filter.mean = group.filter.mean + 0.3 * drawn(*group.filter.mean.shape, seed=5)
    for step in range(3):
        x, y = drawn(rows, 4, seed=10 + step), (np.arange(rows) + step) % (outputs + 1)
        look = fast.look(x)
        e, b = fast.observing.derivatives(look.predicted, y)
        wanted = []
        for group in fast.groups:
            f, jacobian = group.network.jacobian(group.filter.mean, x)
            assert np.abs(look.f[group.place] - f).max() < 1e-12
            for r, expert in enumerate(range(group.place.start, group.place.stop)):
                s, j, root = (
                    covariance_of(group.filter, r),
                    jacobian[r].reshape(rows * outputs, -1),
                    blocks_of(*b[expert]),
                )
                v, residual = j @ s @ j.T, e[expert].flatten()
                assert np.abs(look.variance[expert] - v).max() < 1e-12
                inner = np.linalg.inv(np.eye(len(v)) + root.T @ v @ root)
                a = residual - root @ inner @ root.T @ v @ residual
                wanted.append((group.filter.mean[r] + s @ j.T @ a, s - s @ j.T @ root @ inner @ root.T @ j @ s))
        fast.learn(look, x, y, 1)
        for group in fast.groups:
            for r, (mean, covariance) in enumerate(wanted[group.place]):
                found = covariance_of(group.filter, r)
                own = np.where(found != 0, covariance, 0) if filter is Units else covariance  # its blocks alone
                assert np.abs(group.filter.mean[r] - mean).max() < 1e-10
                assert np.abs(found - own).max() < 1e-10


def test_inner_steps_find_the_mode_and_count_a_row_once() -> None:
    """For logistic regression, they solve the same problem as Newton's method on the sum of prior and likelihood."""

    class AtMean(Classes):
        """Derivatives at the outputs' mean, as Laplace's approximation has them."""

        def predict(self, f: Array, w: Array) -> Array:
            return super().predict(f, 0 * w)

    x = drawn(20, 3)
    y = (x[:, 0] > 0.3).astype(int)
    experts = Experts([default(3, 0, 0)], Full, [math.inf], AtMean())
    experts.grow(1)
    own = experts.groups[0].filter
    assert isinstance(own, Full)
    experts.learn(experts.look(x), x, y, 30)
    theta = np.zeros(4)
    for _ in range(50):
        p = 1 / (1 + np.exp(-wide(x) @ theta))
        precision = np.diag(1 / own.prior) + (wide(x) * (p * (1 - p))[:, None]).T @ wide(x)
        theta = theta + np.linalg.solve(precision, wide(x).T @ (y - p) - theta / own.prior)
    assert np.abs(own.mean[0] - theta).max() < 1e-6
    assert np.abs(own.covariance[0] - np.linalg.inv(precision)).max() < 1e-3


def test_a_singular_curvature_needs_no_inverse() -> None:
    """Rows without any information leave everything as it was."""
    look = linear(Full, [math.inf]).look(drawn(3, 3))
    a, root, failed = solved(look.variance, 0 * look.f, 0 * look.f[..., None])
    assert not a.any()
    assert np.array_equal(root[0], np.eye(3))
    assert not failed.any()


@pytest.mark.parametrize("size", [3, 20])
def test_a_covariance_without_precision_is_named(size: int) -> None:
    half = drawn(2, size, size)
    matrices = half @ half.swapaxes(1, 2) + np.eye(size)
    root, failed = inverse_root(matrices)
    assert np.abs(root.swapaxes(1, 2) @ root @ matrices - np.eye(size)).max() < 1e-10
    assert not failed.any()
    matrices[1, 1, 1] = -1
    assert inverse_root(matrices)[1].tolist() == [False, True]


@pytest.mark.parametrize("size", [5, 200])
def test_small_and_large_arrays_give_the_same(size: int) -> None:
    """numpy computes the small ones, torch the large ones."""
    a, b, s = drawn(3, 20, size), drawn(3, size, size, seed=1), drawn(3, size, size, seed=2)
    assert np.abs(product(a, b) - np.einsum("rij,rjk->rik", a, b)).max() < 1e-10
    wanted = s - np.einsum("rji,rjk->rik", a, a)
    less_squares(s, a)
    assert np.abs(s - wanted).max() < 1e-10


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("filter", [Full, Units])
def test_covariances_stay_symmetric_and_positive_while_they_forget(filter: type, batch: int) -> None:
    experts = classifier(default(3, 6, 0), filter, [30.0])
    x = drawn(1600, 3)
    y = (x[:, 0] * x[:, 1] > 0).astype(int)
    learned(experts, x, y, batch)
    found = covariance_of(experts.groups[0].filter, 0)
    assert np.abs(found - found.T).max() < 1e-12
    assert np.linalg.eigvalsh(found).min() > 0


def test_the_blocks_of_a_whole_covariance_go_on_as_units() -> None:
    """Also while rows wait, and after it has forgotten."""
    experts = classifier(default(3, 20, 0), Full, [30.0, math.inf], outputs=2)
    x = drawn(21, 3)
    for i in range(21):
        experts.learn(experts.look(x[i : i + 1]), x[i : i + 1], np.array([i % 3]), 1)
    full = experts.groups[0].filter
    assert isinstance(full, Full)
    assert full.used
    units = Units.of_full(full)
    assert np.array_equal(units.mean, full.mean)
    for r in range(2):
        found, whole = covariance_of(units, r), covariance_of(full, r)
        assert np.abs(found - np.where(found != 0, whole, 0)).max() < 1e-12
        assert np.abs(np.diag(found) - np.diag(whole)).max() < 1e-12
