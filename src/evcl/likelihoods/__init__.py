"""Likelihoods: they turn the network's outputs into an NLL, predictions and the targets of the Fisher."""

from evcl._core.errors import EvclError
from evcl.likelihoods.bernoulli import Bernoulli
from evcl.likelihoods.bound import Bound
from evcl.likelihoods.categorical import CATEGORICAL, Categorical
from evcl.likelihoods.energy import Energy
from evcl.likelihoods.gaussian import Gaussian
from evcl.likelihoods.likelihood import Likelihood, Objective
from evcl.likelihoods.next_token import NextToken
from evcl.likelihoods.poisson import Poisson

LIKELIHOODS: dict[str, Likelihood] = {
    one.name: one
    for one in (CATEGORICAL, Gaussian(), Bernoulli(), Poisson(), Bound(), Bound(gaussian=True), NextToken())
}
"""The likelihoods by name: classes, numbers, yes-or-no labels, counts; and the energies of models without labels."""


def get(name: str | Energy) -> Likelihood:
    """The likelihood of this name, or the energy itself."""
    if isinstance(name, Energy):
        return name
    if not isinstance(name, str) or name not in LIKELIHOODS:
        raise EvclError(f"likelihood must be one of {', '.join(LIKELIHOODS)}, or an Energy, not {name!r}")
    return LIKELIHOODS[name]


__all__ = [
    "CATEGORICAL",
    "LIKELIHOODS",
    "Bernoulli",
    "Bound",
    "Categorical",
    "Energy",
    "Gaussian",
    "Likelihood",
    "NextToken",
    "Objective",
    "Poisson",
    "get",
]
