"""Data and a network in, how much each weight matters out."""

from evcl.curvature.fisher import KINDS, fisher

__all__ = ["KINDS", "fisher"]
