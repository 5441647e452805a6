"""Estimate from data how much each weight of a network matters."""

from evcl.curvature.fisher import KINDS, fisher
from evcl.curvature.kfac import Factors, kfac
from evcl.curvature.step import StepCurvature

__all__ = ["KINDS", "Factors", "StepCurvature", "fisher", "kfac"]
