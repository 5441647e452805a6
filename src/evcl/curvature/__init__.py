"""Data and a network in, how much each weight matters out."""

from evcl.curvature.fisher import KINDS, fisher
from evcl.curvature.kfac import Factors, kfac

__all__ = ["KINDS", "Factors", "fisher", "kfac"]
