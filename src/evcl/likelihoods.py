"""The name of `evcl.targets` until 0.2; it goes in 0.4."""

import warnings
from typing import Any

from evcl import targets


def __getattr__(name: str) -> Any:
    if name not in targets.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"evcl.likelihoods is now evcl.targets: use evcl.targets.{name}; the old name goes in 0.4",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(targets, name)
