"""A torch module in, one with Gaussian weights out."""

from evcl.nn.convert import Names, bayesianize, register
from evcl.nn.layers import BayesianLayer, Dropout, Linear, Weights
from evcl.nn.mlp import MLP, mlp
from evcl.nn.network import BayesianNetwork, outputs
from evcl.nn.posterior import Gaussian, Layout, he_uniform
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
    "he_uniform",
    "head",
    "head_names",
    "mlp",
    "outputs",
    "register",
]
