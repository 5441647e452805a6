"""A posterior of laplace-torch as a learner's first prior."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from others import needed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evcl

needed("laplace")
from laplace import Laplace  # noqa: E402

from evcl.integrations.laplace import from_laplace  # noqa: E402

TASK = evcl.benchmarks.get("permuted-digits", tasks=1)[0]


@pytest.fixture(scope="module")
def fitted():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10))
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        loader = DataLoader(TensorDataset(*TASK.train), 64, shuffle=True)
        for _ in range(10):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        found = Laplace(model, "classification", "all", "diag")
        found.fit(DataLoader(TensorDataset(*TASK.train), 200))
    return found


def test_mean_and_precision_are_those_of_laplace_torch(fitted):
    prior = from_laplace(fitted)
    learner = evcl.VCL(fitted.model[:-1], prior=prior, init="network", epochs=1)
    first = learner.state.run.memory.prior
    count = first.mean.shape[1]
    torch.testing.assert_close(first.mean[0], fitted.mean[:count])
    torch.testing.assert_close((-2 * first.log_std[0]).exp(), fitted.posterior_precision[:count])
    assert torch.equal(prior.means["0.weight"], fitted.model[0].weight)


def test_evcl_s_own_fisher_agrees_with_it(fitted):
    """Laplace's precision is the prior's plus the number of examples times the Fisher."""
    penalty = evcl.integrations.Penalty(
        fitted.model, "ewc", fisher_examples=len(TASK.train), fisher_temperature=1.0, fisher_spread=0.0
    )
    with penalty.task(tuple(TASK.train)):
        pass
    ours = penalty.memory.importance[0] + fitted.prior_precision_diag
    torch.testing.assert_close(ours, fitted.posterior_precision, rtol=2e-3, atol=1e-3)


def test_other_posteriors_are_refused(fitted):
    model = fitted.model
    with pytest.raises(evcl.EvclError, match="must be a DiagLaplace, not KronLaplace"):
        from_laplace(Laplace(model, "classification", "all", "kron"))
    with pytest.raises(evcl.EvclError, match="must be a DiagLaplace"):
        from_laplace(Laplace(model, "classification", "last_layer", "kron"))
