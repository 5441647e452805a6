"""One class for each common method: `evcl.EVCL(network)` is `evcl.Learner(network, "evcl")`. Their keyword arguments
are typed, so that an editor completes `evcl.EVCL(network, strength=...)`.

`evcl._core.settings` says what each setting means and what it may be; a test compares the two.
"""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack

import torch
from torch import nn

from evcl.learner.learner import Learner
from evcl.nn import LoRA, Names, Prior
from evcl.nn.inputs import Output

Auto = Literal["auto"]


class LearnerOptions(TypedDict, total=False):
    """Options of every learner: see `evcl.Learner`."""

    seed: int
    init: Literal["auto", "draw", "network"]
    unsupported: Literal["error", "deterministic"]
    only: Names
    skip: Names
    prior: Literal["zero", "network"] | Prior
    output: Output
    likelihood: Literal["categorical", "gaussian", "bernoulli", "poisson"]
    accumulate: int
    adapters: LoRA | None
    device: torch.device | str
    dtype: torch.dtype
    precision: Literal["tf32", "fp32", "bf16"]


class NaiveOptions(LearnerOptions, total=False):
    """Settings of training."""

    lr: float | Auto
    lr_schedule: Literal["constant", "cosine"]
    optimizer: Literal["adam", "sgd"]
    momentum: float
    batch_size: int
    epochs: int
    stop_nll: float
    film: bool
    augment: bool


# The rules of parts, whose names are no identifiers
TemperingRules = TypedDict("TemperingRules", {"tempering.noise": float}, total=False)
KroneckerRules = TypedDict(
    "KroneckerRules",
    {"kronecker.temperature": float, "kronecker.damping": float, "kronecker.once": float, "kronecker.draws": int},
    total=False,
)
DistillationRules = TypedDict("DistillationRules", {"distill.temperature": float}, total=False)
ForgettingRules = TypedDict("ForgettingRules", {"forget.significance": float, "forget.ridge": float}, total=False)
InferenceRules = TypedDict("InferenceRules", {"infer.varied": float, "infer.known": float}, total=False)


class DistillationOptions(DistillationRules, ForgettingRules, total=False):
    """Settings of distillation and forgetting."""

    distill: float
    forget: bool


class ElasticOptions(TypedDict, total=False):
    """Settings of the elastic penalty and of its Fisher."""

    strength: float
    strength_scale: Literal["none", "examples"]
    importance: Literal["fisher", "si", "mas", "kfac"]
    fisher: Literal["exact", "sampled", "empirical"]
    fisher_examples: int
    fisher_draws: int
    fisher_temperature: float
    fisher_spread: float
    fisher_scale: Literal["none", "task", "examples"]
    fisher_decay: float
    fisher_floor: float
    kfac_merge: Literal["nearest", "sum", "pi", "tasks"]


class EWCOptions(NaiveOptions, ElasticOptions, DistillationOptions, total=False):
    """Settings of EWC."""


class VCLOptions(NaiveOptions, DistillationOptions, TemperingRules, total=False):
    """Settings of VCL: of training, of the Gaussian over each weight, of the teacher and of coresets."""

    tempering: float | Auto
    init_std: float | Auto
    prior_std: float | Auto
    std_lr_scale: float
    std_update: Literal["adam", "natural"]
    std_rate: float | Auto
    predict_samples: int
    coreset: Literal["none", "random", "kcenter"]
    coreset_size: int


class EVCLOptions(VCLOptions, ElasticOptions, InferenceRules, KroneckerRules, total=False):
    """Settings of EVCL."""

    posterior: Literal["auto", "diagonal", "kronecker"]
    strength: float | Auto  # type: ignore[misc]
    one_softmax: bool


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
