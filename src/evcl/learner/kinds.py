"""A class for each method that people name: `evcl.EVCL(network)` is `evcl.Learner(network, "evcl")`."""

from __future__ import annotations

from typing import Unpack

from torch import nn

from evcl.learner.learner import Learner
from evcl.learner.options import EVCLOptions, EWCOptions, NaiveOptions, VCLOptions


class EVCL(Learner):
    """Elastic variational continual learning: VCL plus a Fisher-weighted penalty on means and variances."""

    def __init__(self, network: nn.Module, **options: Unpack[EVCLOptions]) -> None:
        super().__init__(network, "evcl", **options)


class VCL(Learner):
    """Variational continual learning: a Gaussian over each weight, carried on as the next prior."""

    def __init__(self, network: nn.Module, **options: Unpack[VCLOptions]) -> None:
        super().__init__(network, "vcl", **options)


class EWC(Learner):
    """Elastic weight consolidation: plain weights, held where earlier tasks need them."""

    def __init__(self, network: nn.Module, **options: Unpack[EWCOptions]) -> None:
        super().__init__(network, "ewc", **options)


class Naive(Learner):
    """Plain training, task after task: what forgetting looks like."""

    def __init__(self, network: nn.Module, **options: Unpack[NaiveOptions]) -> None:
        super().__init__(network, "naive", **options)
