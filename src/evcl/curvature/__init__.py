"""Estimate from data how much each weight of a network matters."""

from evcl.curvature.fisher import KINDS, Sample, fisher, sensitivity, spread_out
from evcl.curvature.kernel import kernels
from evcl.curvature.kfac import Kronecker, blocks, kfac
from evcl.curvature.step import StepCurvature

__all__ = [
    "KINDS",
    "Kronecker",
    "Sample",
    "StepCurvature",
    "blocks",
    "fisher",
    "kernels",
    "kfac",
    "sensitivity",
    "spread_out",
]
