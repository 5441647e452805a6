"""A likelihood per class: a generative classifier on fixed random features (compare van de Ven, Li and Tolias, 2021).

    p(f(x) | c) = N(f(x); m_c, S),    p(c | x) = softmax_c [ (log n_c + log N(f(x); m_c, S)) / T ]

m_c is the mean of the features f of class c over n_c rows. All classes share S, the covariance within classes:

    S = (sum_c sum_{x in c} (f(x) - m_c)(f(x) - m_c)^T + k s^2 I) / (n + k),    s^2 its mean variance

k is that of the oracle approximating shrinkage (Chen et al., 2010).

Counts, means and the scatter are sums over rows. So tasks can come in any order, and give what all rows at once would
give: nothing is forgotten, and no row is kept. Softmax layers are different: their classes compete in training, so a
task without the old classes teaches them never to predict these.

The features are ReLU units with random weights, drawn from the seed. For images they are convolutions, averaged over a
grid of 4 x 4 fields. They are centred and scaled by the mean and the standard deviation of the first task's inputs. If
no layer of the trunk is trained, they are units on top of the trunk's features. If only adapters are trained (see
nn/lora.py), they are the features of the base model themselves, which has learned from far more data, plus a 0 if their
number is one that random units can have.

A Gaussian is too confident, so its log-likelihoods are divided by T. T minimises the NLL of rows that each task holds
out, predicted among all classes known by then; afterwards, these rows are added to the statistics as well.

This is the method `generative-classifier`, and the part of EVCL that tells apart classes, and domains of the same
classes, that were never learned together (see task_inference.py).
"""

from __future__ import annotations

from dataclasses import replace

from evcl._core.errors import EvclError
from evcl._core.settings import TRAINING, Settings
from evcl.methods.class_statistics import Statistics, log_joint
from evcl.methods.counting import counted
from evcl.methods.method import Learned, Learning, Method, Round


def _learn(memory: Statistics, round_: Round, s: Settings) -> Learning:
    statistics = counted(memory, round_)
    if not statistics.classes:
        raise EvclError("a likelihood per class cannot be learned from tokens, or from inputs of several shapes")
    return Learned(round_.posterior, statistics)
    yield  # a generator that requests no fit


GENERATIVE_CLASSIFIER = Method(
    name="generative-classifier",
    only_classes="it has a density of the inputs of each class",
    learn=_learn,
    memory=Statistics,
    settings={
        "film": replace(
            TRAINING["film"], refuses={"true": "it trains nothing, so FiLM's scales and shifts would never change"}
        )
    },
    log_joint=log_joint,
    generative=True,
    no_memory="it trains nothing, and forgets nothing",
    stages=0,
)
