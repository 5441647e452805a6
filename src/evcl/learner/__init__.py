"""The learner, the main object of the library: a network that learns one task after another."""

from evcl.learner.card import read_card
from evcl.learner.kinds import EVCL, EWC, VCL, Naive
from evcl.learner.learner import Learner
from evcl.learner.learning import NEW
from evcl.learner.loading import load, rebuilt
from evcl.learner.predictor import INFER, Measures, Predictions

__all__ = [
    "EVCL",
    "EWC",
    "INFER",
    "NEW",
    "VCL",
    "Learner",
    "Measures",
    "Naive",
    "Predictions",
    "load",
    "read_card",
    "rebuilt",
]
