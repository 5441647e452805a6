"""The likelihoods and energies by name."""

from __future__ import annotations

from evcl._core.errors import EvclError
from evcl.targets.bound import Bound
from evcl.targets.classes import CATEGORICAL
from evcl.targets.counts import Poisson
from evcl.targets.energy import Energy
from evcl.targets.labels import Bernoulli
from evcl.targets.likelihood import Likelihood
from evcl.targets.next_token import NextToken
from evcl.targets.numbers import Gaussian

LIKELIHOODS: dict[str, Likelihood] = {one.name: one for one in (CATEGORICAL, Gaussian(), Bernoulli(), Poisson())}
"""The likelihoods by name: classes, numbers, several yes-or-no labels, counts."""
ENERGIES: dict[str, Energy] = {one.name: one for one in (Bound(), Bound(gaussian=True), NextToken())}
"""The energies by name, of models that need no labels: generative models, and language models."""


def get(name: str | Energy) -> Likelihood:
    """The likelihood or energy of this name, or the energy itself."""
    if isinstance(name, Energy):
        return name
    known: dict[str, Likelihood] = {**LIKELIHOODS, **ENERGIES}
    if not isinstance(name, str) or name not in known:
        raise EvclError(f"likelihood must be one of {', '.join(known)}, or an Energy, not {name!r}")
    return known[name]
