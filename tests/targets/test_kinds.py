"""Every likelihood: its NLL and Fisher beside autograd and torch.distributions, in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Normal, Poisson

import evcl
from evcl.targets import CATEGORICAL, LIKELIHOODS, Energy, Estimate, Likelihood

R, N, D = 2, 5, 3
OTHERS = [one for one in LIKELIHOODS.values() if one is not CATEGORICAL]


def case(likelihood: Likelihood) -> tuple[Tensor, Tensor]:
    """Outputs [R, N, ...] and targets [R, N, D]."""
    g = torch.Generator().manual_seed(3)
    f = torch.randn(R, N, D, generator=g, dtype=torch.float64)
    beside = 0.3 * torch.randn(R, N, D, generator=g, dtype=torch.float64)
    y = torch.randn(R, N, D, generator=g, dtype=torch.float64)
    if likelihood.name == "bernoulli":
        y = (y > 0).double()
    if likelihood.name == "poisson":
        y = (3 * y.abs()).round()
    return torch.cat([f, beside], 2) if likelihood.beside else f, y


def reference(likelihood: Likelihood, outputs: Tensor) -> torch.distributions.Distribution:
    if likelihood.name == "bernoulli":
        return Bernoulli(logits=outputs)
    f, beside = outputs.chunk(2, -1)
    return Normal(f, (beside / 2).exp()) if likelihood.name == "gaussian" else Poisson((f + beside).exp())


@pytest.mark.parametrize("likelihood", OTHERS, ids=lambda one: one.name)
def test_nll_is_that_of_the_distribution(likelihood: Likelihood) -> None:
    outputs, y = case(likelihood)
    wanted = -reference(likelihood, outputs).log_prob(y).sum(-1)
    torch.testing.assert_close(likelihood.nll(outputs.flatten(0, 1), y.flatten(0, 1), None).view(R, N), wanted)


@pytest.mark.parametrize("likelihood", OTHERS, ids=lambda one: one.name)
def test_nll_uses_the_columns_of_each_examples_head(likelihood: Likelihood) -> None:
    outputs, y = (one.flatten(0, 1) for one in case(likelihood))
    width = outputs.shape[1]
    both = torch.cat([outputs, torch.full_like(outputs, 7.0)], 1)
    both[1::2] = both[1::2].roll(width, 1)
    columns = torch.tensor([[0, width], [width, 2 * width]]).repeat(R * N // 2, 1)
    torch.testing.assert_close(likelihood.nll(both, y, columns), likelihood.nll(outputs, y, None))


def sample(of: torch.distributions.Distribution, seed: int) -> Tensor:
    """A draw that leaves the global generator alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return of.sample()


def squares(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Tensor:
    """[R, N, D]: the squared gradient of log p(y) with respect to each output, by autograd."""
    leaf = outputs[..., :D].clone().requires_grad_()
    whole = torch.cat([leaf, outputs[..., D:]], -1)
    (found,) = torch.autograd.grad(reference(likelihood, whole).log_prob(y).sum(), leaf)
    return found.square()


def found_squares(likelihood: Likelihood, outputs: Tensor, y: Tensor, kind: str, weights: Tensor) -> Tensor:
    leaf = outputs[..., :D].clone().requires_grad_()
    whole = torch.cat([leaf, outputs[..., D:]], -1)
    generators = [torch.Generator().manual_seed(r) for r in range(R)]
    targets = likelihood.fisher_targets(whole, y, weights, Estimate(kind, generators))
    each = [torch.autograd.grad(one, leaf, retain_graph=True)[0] for one in targets]
    return sum((one.square() for one in each), torch.zeros_like(leaf))


@pytest.mark.parametrize("likelihood", OTHERS, ids=lambda one: one.name)
def test_the_empirical_fisher_is_the_squared_gradient(likelihood: Likelihood) -> None:
    outputs, y = case(likelihood)
    weights = 1 + torch.arange(N, dtype=torch.float64).expand(R, N)
    wanted = weights.unsqueeze(2) * squares(likelihood, outputs, y)
    torch.testing.assert_close(found_squares(likelihood, outputs, y, "empirical", weights), wanted)


@pytest.mark.parametrize("likelihood", OTHERS, ids=lambda one: one.name)
def test_the_exact_fisher_is_the_mean_over_targets(likelihood: Likelihood) -> None:
    outputs, y = case(likelihood)
    ones = torch.ones(R, N, dtype=torch.float64)
    exact = found_squares(likelihood, outputs, y, "exact", ones)
    draws = 20_000
    wide = outputs.unsqueeze(0).expand(draws, *outputs.shape).flatten(0, 1)
    mean = squares(likelihood, wide, sample(reference(likelihood, wide), 0)).view(draws, R, N, D).mean(0)
    torch.testing.assert_close(exact, mean, rtol=0.08, atol=0.01)


@pytest.mark.parametrize("likelihood", OTHERS, ids=lambda one: one.name)
def test_the_sampled_fisher_draws_from_each_replicas_generator(likelihood: Likelihood) -> None:
    outputs, y = case(likelihood)
    many = outputs[:, :1].expand(R, 4000, -1)
    ones = torch.ones(R, 4000, dtype=torch.float64)
    sampled = found_squares(likelihood, many, y[:, :1].expand(R, 4000, D), "sampled", ones)
    exact = found_squares(likelihood, outputs, y, "exact", torch.ones(R, N, dtype=torch.float64))[:, 0]
    torch.testing.assert_close(sampled.mean(1), exact, rtol=0.15, atol=0.02)


@pytest.mark.parametrize("likelihood", OTHERS, ids=lambda one: one.name)
def test_surprise_is_about_one_for_targets_as_expected(likelihood: Likelihood) -> None:
    outputs, _ = case(likelihood)
    many = outputs[:, :1].expand(R, 20_000, -1)
    y = sample(reference(likelihood, many), 1)
    usual, far = (likelihood.surprise(many, one, None) for one in (y, y + 3))  # type: ignore[attr-defined]
    torch.testing.assert_close(usual, torch.ones(R).double(), rtol=0.05, atol=0.05)
    assert bool((far > 2).all())


@pytest.mark.parametrize("likelihood", LIKELIHOODS.values(), ids=lambda one: one.name)
def test_a_copy_is_the_object_itself(likelihood: Likelihood) -> None:
    """So that `likelihood is CATEGORICAL` also holds in a copy of a learner."""
    assert copy.copy(likelihood) is copy.deepcopy([likelihood])[0] is likelihood


def test_the_package_is_also_found_under_its_earlier_name() -> None:
    with pytest.warns(DeprecationWarning, match=r"use evcl\.targets\.Energy"):
        assert evcl.likelihoods.Energy is Energy
    with pytest.raises(AttributeError):
        evcl.likelihoods.Nothing  # noqa: B018
