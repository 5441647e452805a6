"""Turn a torch module into one with Gaussian weights."""

from evcl.nn.convert import Names, bayesianize, copied, register
from evcl.nn.layer import BayesianLayer, Weights
from evcl.nn.layers import Dropout, Linear
from evcl.nn.network import BayesianNetwork, outputs
from evcl.nn.perceptron import MLP, mlp
from evcl.nn.posterior import Gaussian, Layout, he_std, he_uniform, log_stds
from evcl.nn.sampled import SampledLayer
from evcl.nn.slots import Slot, head, head_names
from evcl.nn.winners import KWinners

__all__ = [
    "MLP",
    "BayesianLayer",
    "BayesianNetwork",
    "Dropout",
    "Gaussian",
    "KWinners",
    "Layout",
    "Linear",
    "Names",
    "SampledLayer",
    "Slot",
    "Weights",
    "bayesianize",
    "copied",
    "he_std",
    "he_uniform",
    "head",
    "head_names",
    "log_stds",
    "mlp",
    "outputs",
    "register",
]
