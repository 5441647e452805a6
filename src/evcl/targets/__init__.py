"""Likelihoods: they turn the network's outputs into an NLL, predictions and the targets of the Fisher.

In: targets as a user has them, and outputs of a head. Out: an NLL, predictions with uncertainty, measurements.
To change: a kind of target can be added as one object (`likelihood.py` is the contract): no other package asks what
kind it is. Fixed: golden numbers.
"""

from typing import TYPE_CHECKING

from evcl._core.lazy import lazily
from evcl.targets.classes import CATEGORICAL, Categorical
from evcl.targets.energy import Energy
from evcl.targets.likelihood import Estimate, Likelihood, Objective

if TYPE_CHECKING:
    from evcl.targets.bound import Bound
    from evcl.targets.counts import Poisson
    from evcl.targets.known import ENERGIES, LIKELIHOODS, get
    from evcl.targets.labels import Bernoulli
    from evcl.targets.next_token import NextToken
    from evcl.targets.numbers import Gaussian
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "evcl.targets.bound": "Bound",
            "evcl.targets.counts": "Poisson",
            "evcl.targets.known": "ENERGIES LIKELIHOODS get",
            "evcl.targets.labels": "Bernoulli",
            "evcl.targets.next_token": "NextToken",
            "evcl.targets.numbers": "Gaussian",
        },
    )

__all__ = [
    "CATEGORICAL",
    "ENERGIES",
    "LIKELIHOODS",
    "Bernoulli",
    "Bound",
    "Categorical",
    "Energy",
    "Estimate",
    "Gaussian",
    "Likelihood",
    "NextToken",
    "Objective",
    "Poisson",
    "get",
]
