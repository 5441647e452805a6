"""Likelihoods: they turn the network's outputs into an NLL, predictions and the targets of the Fisher."""

from evcl.likelihoods.categorical import CATEGORICAL, Categorical
from evcl.likelihoods.likelihood import Likelihood, Objective

__all__ = ["CATEGORICAL", "Categorical", "Likelihood", "Objective"]
