"""Bayesian continual learning: a model learns one task after another, and keeps what it knew."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _version

from evcl import benchmarks, methods, metrics, nn
from evcl._core.errors import Diverged, EvclError
from evcl.callbacks import Callback, Epoch
from evcl.learner import EVCL, EWC, VCL, Learner, Measures, Naive, Predictions, load

try:
    __version__ = _version("evcl")
    """The version that is installed."""
except PackageNotFoundError:  # run from the source folder, not installed
    __version__ = "0"

__all__ = [
    "EVCL",
    "EWC",
    "VCL",
    "Callback",
    "Diverged",
    "Epoch",
    "EvclError",
    "Learner",
    "Measures",
    "Naive",
    "Predictions",
    "__version__",
    "benchmarks",
    "load",
    "methods",
    "metrics",
    "nn",
]
