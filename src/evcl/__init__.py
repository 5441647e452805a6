"""Bayesian continual learning: a model learns one task after another without forgetting the earlier ones."""

from typing import TYPE_CHECKING

from evcl._core.lazy import lazily

if TYPE_CHECKING:
    from evcl import benchmarks, methods, metrics, nn, streams, targets
    from evcl._core.errors import Diverged, EvclError, ForgettingWarning
    from evcl._core.version import __version__
    from evcl.callbacks import Callback, Epoch
    from evcl.learner import EVCL, EWC, VCL, Learner, Measures, Naive, NumberMeasures, Numbers, Predictions, load, merge
    from evcl.streams import Stream
else:  # torch takes seconds to import, and some commands do not need it
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "evcl._core.errors": "Diverged EvclError ForgettingWarning",
            "evcl._core.version": "__version__",
            "evcl.callbacks": "Callback Epoch",
            "evcl.learner": "EVCL EWC VCL Learner Measures Naive NumberMeasures Numbers Predictions load merge",
            "evcl.streams": "Stream",
        },
        submodules=(
            "benchmarks", "callbacks", "curvature", "data", "integrations", "learner", "likelihoods", "methods",
            "metrics", "nn", "rl", "streams", "targets", "training",
        ),
    )  # fmt: skip

__all__ = [
    "EVCL",
    "EWC",
    "VCL",
    "Callback",
    "Diverged",
    "Epoch",
    "EvclError",
    "ForgettingWarning",
    "Learner",
    "Measures",
    "Naive",
    "NumberMeasures",
    "Numbers",
    "Predictions",
    "Stream",
    "__version__",
    "benchmarks",
    "load",
    "merge",
    "methods",
    "metrics",
    "nn",
    "streams",
    "targets",
]
