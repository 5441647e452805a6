"""A torch module in, one with Gaussian weights out."""

from evcl.nn.convert import Names, bayesianize, register
from evcl.nn.layers import BayesianLayer, Dropout, Linear, Weights
from evcl.nn.network import BayesianNetwork, outputs
from evcl.nn.perceptron import MLP, mlp
from evcl.nn.posterior import Gaussian, Layout, he_std, he_uniform, log_stds
from evcl.nn.slots import Slot, head, head_names
from evcl.nn.whole import Whole

__all__ = [
    "MLP",
    "BayesianLayer",
    "BayesianNetwork",
    "Dropout",
    "Gaussian",
    "Layout",
    "Linear",
    "Names",
    "Slot",
    "Weights",
    "Whole",
    "bayesianize",
    "he_std",
    "he_uniform",
    "head",
    "head_names",
    "log_stds",
    "mlp",
    "outputs",
    "register",
]
