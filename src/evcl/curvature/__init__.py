"""Estimate from data how much each weight of a network matters.

In: a network, its weights and rows. Out: the Fisher information, diagonal or as Kronecker factors, and kernels of
outputs.
To change: how it is computed; `tests/curvature` compares each with a naive loop. Fixed: the draws of labels (golden
numbers).
"""

from typing import TYPE_CHECKING

from evcl._core.lazy import lazily
from evcl.curvature.fisher import KINDS, Sample, fisher, sensitivity, spread_out
from evcl.curvature.kernel import kernels
from evcl.curvature.kfac import Kronecker, blocks, kfac

if TYPE_CHECKING:
    from evcl.curvature.step import StepCurvature
else:
    __getattr__, __dir__ = lazily(__name__, {"evcl.curvature.step": "StepCurvature"})

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
