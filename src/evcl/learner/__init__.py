"""The learner, the main object of the library: a network that learns one task after another.

In: a torch module, a method, and rows with labels. Out: predictions, measurements, a model file.
To change: how input is read and options are checked. Fixed: files of earlier versions are read (`persist.py`, and
`tests/fixtures`, which are never made again), and a call that fails leaves the learner as it was.
"""

from typing import TYPE_CHECKING

from evcl._core.lazy import lazily

if TYPE_CHECKING:
    from evcl.learner.kinds import EVCL, EWC, VCL, Naive
    from evcl.learner.learner import Learner
    from evcl.learner.learning import NEW
    from evcl.learner.merging import merge
    from evcl.learner.persist import load, read_card, rebuilt
    from evcl.learner.reading import INFER
    from evcl.targets.answers import Measures, NumberMeasures, Numbers, Predictions
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "evcl.targets.answers": "Measures NumberMeasures Numbers Predictions",
            "evcl.learner.kinds": "EVCL EWC VCL Naive",
            "evcl.learner.learner": "Learner",
            "evcl.learner.learning": "NEW",
            "evcl.learner.persist": "load read_card rebuilt",
            "evcl.learner.merging": "merge",
            "evcl.learner.reading": "INFER",
        },
    )

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
