"""The scales of targets in a learner's file: see `evcl.training.targets.Scale`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from evcl._core.errors import EvclError
from evcl.training.targets import Scale


def scale_described(scale: Scale) -> dict[str, Any]:
    """The scale of a head's targets, as JSON can hold it."""
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in scale._asdict().items()
    }


def scales_in(saved: Mapping[str, Any], heads: Mapping[str, Sequence[Any]]) -> dict[str, Scale]:
    """The scales of the heads' targets in a file. Raises if one cannot be right."""
    found = saved["scales"]
    if not isinstance(found, dict) or found.keys() != heads.keys():
        raise EvclError("the scales of its targets do not fit its heads")
    scales = {}
    for name, told in found.items():
        numbers = [told[key] for key in ("rows", "tested", "tasks")]
        lists = [told[key] for key in ("mean", "std", "errors")]
        if not all(isinstance(one, list) and len(one) == len(heads[name]) for one in lists):
            raise EvclError("the scales of its targets do not fit its heads")
        every = [*numbers, *(value for one in lists for value in one)]
        if not all(type(value) in (int, float) and math.isfinite(value) and abs(value) < 1e60 for value in every):
            raise EvclError("the scales of its targets must be finite numbers")
        if min([*numbers, *told["errors"]]) < 0 or not min(told["std"]) > 0:
            raise EvclError("the scales of its targets must have counts of at least 0 and deviations above 0")
        mean, std, errors = (torch.tensor(one, dtype=torch.float64) for one in lists)
        scales[name] = Scale(float(told["rows"]), mean, std, errors, float(told["tested"]), int(told["tasks"]))
    return scales
