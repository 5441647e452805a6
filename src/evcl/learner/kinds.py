"""One class for each common method: `evcl.EVCL(network)` is `evcl.Learner(network, "evcl")`."""

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
    """Variational continual learning: a Gaussian over each weight, which becomes the next task's prior."""

    def __init__(self, network: nn.Module, **options: Unpack[VCLOptions]) -> None:
        super().__init__(network, "vcl", **options)


class EWC(Learner):
    """Elastic weight consolidation: point weights, with a penalty on changing those that earlier tasks need."""

    def __init__(self, network: nn.Module, **options: Unpack[EWCOptions]) -> None:
        super().__init__(network, "ewc", **options)


class Naive(Learner):
    """Plain training on one task after another, with nothing against forgetting: the baseline."""

    def __init__(self, network: nn.Module, **options: Unpack[NaiveOptions]) -> None:
        super().__init__(network, "naive", **options)
