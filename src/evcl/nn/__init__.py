"""A torch module in, one with Gaussian weights out."""

from evcl.nn.convert import bayesianize, register
from evcl.nn.layers import BayesianLayer, Conv2d, Dropout, Linear, Weights
from evcl.nn.mlp import MLP, mlp
from evcl.nn.network import BayesianNetwork, he_uniform, head_names
from evcl.nn.posterior import Gaussian, Layout

__all__ = [
    "MLP",
    "BayesianLayer",
    "BayesianNetwork",
    "Conv2d",
    "Dropout",
    "Gaussian",
    "Layout",
    "Linear",
    "Weights",
    "bayesianize",
    "he_uniform",
    "head_names",
    "mlp",
    "register",
]
