"""The learner, the main object of the library: a network that learns one task after another."""

from evcl.learner.answers import Measures, NumberMeasures, Numbers, Predictions
from evcl.learner.card import read_card
from evcl.learner.kinds import EVCL, EWC, VCL, Naive
from evcl.learner.learner import Learner
from evcl.learner.learning import NEW
from evcl.learner.loading import load, rebuilt
from evcl.learner.merging import merge
from evcl.learner.reading import INFER

__all__ = [
    "EVCL",
    "EWC",
    "INFER",
    "NEW",
    "VCL",
    "Learner",
    "Measures",
    "Naive",
    "NumberMeasures",
    "Numbers",
    "Predictions",
    "load",
    "merge",
    "read_card",
    "rebuilt",
]
