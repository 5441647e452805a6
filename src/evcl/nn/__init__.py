"""Turn a torch module into one with Gaussian weights.

In: any torch module. Out: a `BayesianNetwork`, whose layers draw their weights, for R replicas in one batch [R*B,
...].
To change: layers can be added (`register`); `tests/nn/test_every_layer.py` compares each with a naive one. Fixed:
only Bayesian layers unfold replicas, and the order of the weights in a layout, which model files depend on.
"""

from typing import TYPE_CHECKING

from evcl._core.lazy import lazily
from evcl.nn.convert import Names, bayesianize, copied, register
from evcl.nn.initial import Prior, he_std, he_uniform, log_stds
from evcl.nn.layer import BayesianLayer, Weights
from evcl.nn.layers import Dropout, Linear
from evcl.nn.lora import LoRA
from evcl.nn.network import BayesianNetwork
from evcl.nn.passes import outputs
from evcl.nn.perceptron import MLP, mlp
from evcl.nn.private import PerTask
from evcl.nn.sampled import SampledLayer
from evcl.nn.slots import Slot, head, head_names
from evcl.posterior import Gaussian, Layout, Part

if TYPE_CHECKING:
    from evcl.nn.bert import Bert, minilm, minilm_tokeniser
    from evcl.nn.efficientnet import EfficientNetLite0, efficientnet_lite0
    from evcl.nn.truncation import truncate
    from evcl.nn.vae import VAE, task_vae
    from evcl.nn.winners import KWinners
else:  # the pretrained networks need the data sets' cache
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "evcl.nn.bert": "Bert minilm minilm_tokeniser",
            "evcl.nn.efficientnet": "EfficientNetLite0 efficientnet_lite0",
            "evcl.nn.truncation": "truncate",
            "evcl.nn.vae": "VAE task_vae",
            "evcl.nn.winners": "KWinners",
        },
    )

__all__ = [
    "MLP",
    "VAE",
    "BayesianLayer",
    "BayesianNetwork",
    "Bert",
    "Dropout",
    "EfficientNetLite0",
    "Gaussian",
    "KWinners",
    "Layout",
    "Linear",
    "LoRA",
    "Names",
    "Part",
    "PerTask",
    "Prior",
    "SampledLayer",
    "Slot",
    "Weights",
    "bayesianize",
    "copied",
    "efficientnet_lite0",
    "he_std",
    "he_uniform",
    "head",
    "head_names",
    "log_stds",
    "minilm",
    "minilm_tokeniser",
    "mlp",
    "outputs",
    "register",
    "task_vae",
    "truncate",
]
