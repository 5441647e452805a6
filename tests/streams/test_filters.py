"""Filters and networks beside slow references, in float64."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import evcl
from evcl.streams.experts import Experts
from evcl.streams.filters import Diagonal, Full, LowRank, solved
from evcl.streams.jacobian import Module, Perceptron, default, of
from evcl.streams.observing import Classes, Numbers
from evcl.streams.units import Units
from evcl.streams.window import Window


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear(filter: type, memories: list[float], noise: float = 0.5, **options: int) -> Experts:
    """A linear model with one target whose noise is known."""
    network = default(3, 0, 0)
    found = Experts(network, lambda *given: filter(*given, **options), memories)
    found.observing = Numbers(len(memories), 1, noise)
    found.grow(1)
    return found


def ridge(x: Tensor, y: Tensor, prior: Tensor, noise: float, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The posterior of a linear model, at once; `weights` [n] of the rows."""
    wide = torch.cat([x, torch.ones(len(x), 1)], 1)
    precision = torch.diag(1 / prior) + (wide * weights[:, None]).mT @ wide / noise**2
    covariance = precision.inverse()
    return covariance @ (wide * weights[:, None]).mT @ y[:, 0] / noise**2, covariance


@pytest.mark.parametrize(("filter", "options"), [(Full, {}), (Units, {}), (LowRank, {"rank": 4})])
@pytest.mark.parametrize("batch", [1, 7])
def test_a_linear_model_is_the_exact_posterior(filter: type, options: dict[str, int], batch: int) -> None:
    x = drawn(60, 3)
    y = x[:, :1] - 2 * x[:, 1:2] + 0.5 * drawn(60, 1, seed=1) + 1
    experts = linear(filter, [math.inf], **options)
    for i in range(0, 60, batch):
        experts.learn(experts.look(x[i : i + batch]), x[i : i + batch], y[i : i + batch], 1)
    mean, covariance = ridge(x, y, experts.filter.prior, 0.5, torch.ones(60))
    assert (experts.filter.mean[0] - mean).abs().max() < 1e-8
    new = drawn(5, 3, seed=2)
    wide = torch.cat([new, torch.ones(5, 1)], 1)
    f, _, w = experts.look(new).predicted.chunk(3, 2)
    assert (f[0, :, 0] - wide @ mean).abs().max() < 1e-8
    assert (w[0, :, 0] - (wide @ covariance * wide).sum(1)).abs().max() < 1e-8


def test_a_linear_model_that_forgets_weighs_earlier_rows_less() -> None:
    """In the precision, S / kept is an exponential window; the prior is far enough away not to matter here."""
    x, memory = drawn(400, 3), 50.0
    y = x[:, :1] + 0.5 * drawn(400, 1, seed=1)
    experts = linear(LowRank, [memory], rank=4)
    for i in range(0, 400, 8):
        experts.learn(experts.look(x[i : i + 8]), x[i : i + 8], y[i : i + 8], 1)
    ages = torch.arange(400).flip(0) // 8 + 1
    kept = (1 - 1 / memory) ** (8 * ages)
    mean, covariance = ridge(x, y, experts.filter.prior, 0.5, kept)
    spread = experts.filter.look(experts.filter.mean, x[:9])[1].variance
    wide = torch.cat([x[:9], torch.ones(9, 1)], 1)
    assert (spread[0].diagonal() - (wide @ covariance * wide).sum(1)).abs().max() < 1e-3
    assert (experts.filter.mean[0] - mean).abs().max() < 0.05


def test_independent_weights_learn_the_diagonal_of_the_precision() -> None:
    x, y = drawn(30, 3), drawn(30, 1, seed=1)
    experts = linear(Diagonal, [math.inf])
    experts.learn(experts.look(x), x, y, 1)
    wide = torch.cat([x, torch.ones(30, 1)], 1)
    wanted = 1 / (1 / experts.filter.prior + wide.square().sum(0) / 0.25)
    assert (experts.filter.variance[0] - wanted).abs().max() < 1e-12  # type: ignore[attr-defined]


def test_mesu_moves_as_its_equations_say() -> None:
    network = default(3, 0, 0)
    mean, prior = torch.zeros(2, 4, dtype=torch.float64), torch.full((4,), 0.5, dtype=torch.float64)
    found = Window(network, mean, prior)
    found.mean += 0.3
    found.variance = torch.full((2, 4), 0.1, dtype=torch.float64)
    window = torch.tensor([100.0, 1000.0], dtype=torch.float64)
    found.forget(1 - 1 / window)
    sigma, w = math.sqrt(0.1), window.unsqueeze(1)
    assert torch.allclose(found.mean, 0.3 + 0.1 * (0 - 0.3) / (w * 0.5))
    assert torch.allclose(found.variance.sqrt(), sigma + sigma * (0.5 - 0.1) / (2 * w * 0.5))


def test_a_window_of_any_length_forgets_towards_the_prior() -> None:
    found = Window(default(3, 0, 0), torch.zeros(1, 4, dtype=torch.float64), torch.full((4,), 0.5, dtype=torch.float64))
    found.variance /= 100
    for _ in range(2000):
        found.forget(torch.tensor([0.9], dtype=torch.float64))
    assert torch.allclose(found.variance, torch.tensor(0.5, dtype=torch.float64))


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
    f, found = network.jacobian(weights, x)
    for r in range(2):
        wanted = torch.func.jacrev(lambda one: network.jacobian(one.unsqueeze(0), x)[0][0])(weights[r])
        assert (found[r] - wanted).abs().max() < 1e-12
    assert f.shape == (2, 6, outputs)


def test_an_mlp_is_the_same_by_hand_and_by_torch_func() -> None:
    network, x = evcl.nn.mlp(4, [5, 3]), drawn(6, 4)
    fast, slow = of(network, x), Module(network, x)
    assert isinstance(fast, Perceptron)
    rows = drawn(2, 2 * len(fast.row), seed=1)
    given = torch.cat([fast.start.expand(2, -1), rows], 1)
    f, found = fast.jacobian(given, x)
    order = torch.cat([_place(layer, network) for layer in network if isinstance(layer, nn.Linear)])
    order = torch.cat([order, torch.arange(len(order), given.shape[1])])
    g, other = slow.jacobian(given[:, order], x)
    assert (f - g).abs().max() < 1e-12
    assert (found[..., order] - other).abs().max() < 1e-12


def _place(layer: nn.Linear, network: nn.Module) -> Tensor:
    """Where the parameters of a layer, weight then bias, are among weights that have the bias of a unit beside it."""
    before = 0
    for one in network:  # type: ignore[attr-defined]
        if one is layer:
            break
        before += sum(p.numel() for p in one.parameters())
    units, fan_in = layer.weight.shape
    grid = before + torch.arange(units * (fan_in + 1)).view(units, fan_in + 1)
    return torch.cat([grid[:, :-1].flatten(), grid[:, -1]])


@pytest.mark.parametrize("outputs", [1, 3])
def test_blocks_of_units_are_those_of_the_whole_jacobian(outputs: int) -> None:
    """The filter by units, beside one that has J and a covariance with zeros outside the blocks."""
    network, x = default(4, 6, 0), drawn(5, 4)
    y = torch.arange(5) % (outputs + 1)
    fast = Experts(network, Units, [math.inf, 100.0])
    fast.observing = Classes()
    fast.grow(outputs)
    fast.filter.mean += 0.3 * drawn(*fast.filter.mean.shape, seed=5)
    units = fast.filter
    assert isinstance(units, Units)
    for _ in range(2):
        whole = torch.stack(
            [torch.block_diag(*(b[r, u] for b in units.blocks for u in range(b.shape[1]))) for r in range(2)]
        )
        f, jacobian = network.jacobian(units.mean, x)
        flat = jacobian.flatten(1, 2)
        look = fast.look(x)
        assert (look.f - f).abs().max() < 1e-12
        assert (look.found.variance - flat @ whole @ flat.mT).abs().max() < 1e-12
        e, b = fast.observing.derivatives(look.predicted, y)
        root = torch.stack([torch.block_diag(*one) for one in b])
        gain = whole @ flat.mT @ root @ (torch.eye(5 * outputs) + root.mT @ look.found.variance @ root).inverse()
        step = whole @ flat.mT @ e.flatten(1).unsqueeze(2) - gain @ root.mT @ look.found.variance @ e.flatten(
            1
        ).unsqueeze(2)
        wanted = whole - gain @ root.mT @ flat @ whole
        before = units.mean.clone()
        fast.waiting = -(10**6)  # nothing is forgotten
        fast.learn(look, x, y, 1)
        assert (units.mean - before - step.squeeze(2)).abs().max() < 1e-10
        place = 0
        for blocks in units.blocks:
            for u in range(blocks.shape[1]):
                size = blocks.shape[2]
                own = wanted[:, place : place + size, place : place + size]
                assert (blocks[:, u] - own).abs().max() < 1e-10
                place += size


def test_inner_steps_find_the_mode_and_count_a_row_once() -> None:
    """For logistic regression, they solve the same problem as Newton's method on the sum of prior and likelihood."""

    class AtMean(Classes):
        """Derivatives at the outputs' mean, as Laplace's approximation has them."""

        def predict(self, f: Tensor, w: Tensor) -> Tensor:
            return super().predict(f, 0 * w)

    x = drawn(20, 3)
    y = (x[:, 0] > 0.3).long()
    network = default(3, 0, 0)
    experts = Experts(network, Full, [math.inf])
    experts.observing = AtMean()
    experts.grow(1)
    prior = experts.filter.prior
    experts.learn(experts.look(x), x, y, 30)
    wide, theta = torch.cat([x, torch.ones(20, 1)], 1), torch.zeros(4, dtype=torch.float64)
    for _ in range(50):
        p = (wide @ theta).sigmoid()
        precision = torch.diag(1 / prior) + (wide * (p * (1 - p))[:, None]).mT @ wide
        theta = theta + torch.linalg.solve(precision, wide.mT @ (y - p) - theta / prior)
    assert (experts.filter.mean[0] - theta).abs().max() < 1e-6
    assert (experts.filter.covariance[0] - precision.inverse()).abs().max() < 1e-3  # type: ignore[attr-defined]


def test_a_singular_curvature_needs_no_inverse() -> None:
    """Rows without any information leave everything as it was."""
    experts = linear(Full, [math.inf])
    look = experts.look(drawn(3, 3))
    a, factor, failed = solved(look.found, 0 * look.f, 0 * look.f.unsqueeze(3))
    assert not bool(a.any())
    assert torch.equal(factor[0], torch.eye(3, dtype=torch.float64))
    assert not bool(failed)


@pytest.mark.parametrize("filter", [Full, Units])
def test_covariances_stay_symmetric_and_positive_while_they_forget(filter: type) -> None:
    network = default(3, 6, 0)
    experts = Experts(network, filter, [30.0])
    experts.observing = Classes()
    experts.grow(1)
    x = drawn(1600, 3)
    y = (x[:, 0] * x[:, 1] > 0).long()
    for i in range(0, 1600, 8):
        experts.learn(experts.look(x[i : i + 8]), x[i : i + 8], y[i : i + 8], 1)
    for name, tensor in experts.filter.state().items():
        if name != "mean":
            assert (tensor - tensor.mT).abs().max() < 1e-12
            assert torch.linalg.eigvalsh(tensor).min() > 0
