"""Estimate from data how much each weight of a network matters."""

from evcl.curvature.fisher import KINDS, fisher, sensitivity, spread_out
from evcl.curvature.kfac import Factors, kfac

__all__ = ["KINDS", "Factors", "fisher", "kfac", "sensitivity", "spread_out"]
