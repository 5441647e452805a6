"""What the network's outputs mean: how likely a target is, what is predicted, and what the Fisher is measured of."""

from evcl.likelihoods.categorical import CATEGORICAL, Categorical
from evcl.likelihoods.likelihood import Likelihood

__all__ = ["CATEGORICAL", "Categorical", "Likelihood"]
