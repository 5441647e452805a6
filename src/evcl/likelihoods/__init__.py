"""Likelihoods: they turn the network's outputs into an NLL, predictions and the targets of the Fisher."""

from evcl._core.errors import EvclError
from evcl.likelihoods.bernoulli import Bernoulli
from evcl.likelihoods.categorical import CATEGORICAL, Categorical
from evcl.likelihoods.gaussian import Gaussian
from evcl.likelihoods.likelihood import Likelihood, Objective
from evcl.likelihoods.poisson import Poisson

LIKELIHOODS: dict[str, Likelihood] = {one.name: one for one in (CATEGORICAL, Gaussian(), Bernoulli(), Poisson())}
"""The likelihoods by name: classes, numbers, several yes-or-no labels, counts."""


def get(name: str) -> Likelihood:
    """The likelihood of this name."""
    if not isinstance(name, str) or name not in LIKELIHOODS:
        raise EvclError(f"likelihood must be one of {', '.join(LIKELIHOODS)}, not {name!r}")
    return LIKELIHOODS[name]


__all__ = [
    "CATEGORICAL",
    "LIKELIHOODS",
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Likelihood",
    "Objective",
    "Poisson",
    "get",
]
