"""Targets y [N, D] that are values, one or several for each example: numbers, counts and yes-or-no labels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from evcl._core.errors import EvclError
from evcl._core.inputs import Label
from evcl.nn import BayesianNetwork
from evcl.targets.answers import Array, NumberMeasures, Numbers, Outcome
from evcl.targets.likelihood import Likelihood
from evcl.targets.scale import Scale

MAX_TARGET = 1e30  # of a target; its square must be finite in float64


class Moments(NamedTuple):
    """Mean and variances [N, D] of predictions, in float64, in the units of the targets."""

    mean: Tensor
    noise: Tensor
    epistemic: Tensor

    @property
    def expected(self) -> Tensor:
        return self.mean

    @property
    def variance(self) -> Tensor:
        return self.noise + self.epistemic

    @property
    def parts(self) -> list[Tensor]:
        return [self.mean, *(one.sqrt() for one in (self.variance, self.noise, self.epistemic))]

    @property
    def doubt(self) -> Tensor:
        """The share of the variance that is due to uncertain weights."""
        return (self.epistemic / self.variance.clamp_min(1e-300)).mean(1)

    def widened(self, rows: Tensor, edge: Outcome, far: Tensor, spread: Tensor) -> Moments:
        change = self.mean[rows] - edge.parts[0]
        more = change.square() + (far.to(change) * spread.to(change)).square()
        return self._replace(epistemic=self.epistemic.index_add(0, rows, more))

    def errors(self, y: Tensor) -> Tensor:
        return (y - self.mean).square() - self.epistemic

    def answer(self, fields: list[Array]) -> Numbers:
        return Numbers(*fields)

    def measure(self, y: Tensor) -> NumberMeasures:
        y = y.to(self.mean)
        error, variance = (y - self.mean).square(), self.variance.clamp_min(1e-300)
        nll = 0.5 * (error / variance + variance.log() + math.log(2 * math.pi)).sum(1).mean()
        inside = (error <= NormalDist().inv_cdf(0.975) ** 2 * variance).double().mean()
        return NumberMeasures(float(error.mean().sqrt()), float(nll), float(inside))


class Values(Likelihood):
    """D values for each example: a head has D outputs.

    Attributes:
        wanted: what the targets must be, in words
    """

    wanted: ClassVar[str]

    def wrong(self, y: Tensor) -> Tensor:
        """[N, D]: which of these numbers cannot be targets."""
        return torch.zeros_like(y, dtype=torch.bool)

    def given(self, y: Tensor, classes: Sequence[Label], scale: Scale | None) -> Tensor:
        assert scale is not None
        return scale.restored(y.double())

    @torch.no_grad()
    def rescale_head(self, head: nn.Linear, network: BayesianNetwork, k: int, scale: Scale) -> None:
        head.weight.mul_(scale.std.to(head.weight).unsqueeze(1))
        head.bias.copy_(scale.restored(head.bias.double()))

    def scales_in(self, saved: Mapping[str, Any], heads: Mapping[str, Sequence[object]]) -> dict[str, Scale]:
        stored = saved["scales"]
        if not isinstance(stored, dict) or stored.keys() != heads.keys():
            raise EvclError("the scales of its targets do not fit its heads")
        scales = {}
        for name, entry in stored.items():
            numbers = [entry[key] for key in ("rows", "tested", "tasks")]
            lists = [entry[key] for key in ("mean", "std", "errors")]
            if not all(isinstance(one, list) and len(one) == len(heads[name]) for one in lists):
                raise EvclError("the scales of its targets do not fit its heads")
            every = [*numbers, *(value for one in lists for value in one)]
            if not all(type(value) in (int, float) and math.isfinite(value) and abs(value) < 1e60 for value in every):
                raise EvclError("the scales of its targets must be finite numbers")
            if min([*numbers, *entry["errors"]]) < 0 or not min(entry["std"]) > 0:
                raise EvclError("the scales of its targets must have counts of at least 0 and deviations above 0")
            mean, std, errors = (torch.tensor(one, dtype=torch.float64) for one in lists)
            scales[name] = Scale(float(entry["rows"]), mean, std, errors, float(entry["tested"]), int(entry["tasks"]))
        return scales

    def expected(self, predicted: Tensor, scale: Scale | None) -> Tensor:
        assert scale is not None
        return self.outcome(predicted, scale, 1).expected

    def doubt(self, averaged: Tensor, scale: Scale | None, draws: int) -> Tensor:
        assert scale is not None
        return self.outcome(averaged, scale, draws).doubt.to(averaged)

    def read(self, x: Tensor, y: object, verb: str) -> Tensor:
        """[N, D] in float64; one target may also be [N]."""
        must = f"with likelihood={self.name!r}, targets must be {self.wanted}"
        try:
            array = np.asarray(y.detach().cpu() if isinstance(y, Tensor) else y)
        except ValueError as error:
            raise EvclError(f"targets must be an array: {error}") from None
        if array.dtype == object:
            try:
                array = array.astype(np.float64)
            except (TypeError, ValueError):
                raise EvclError(f"{must}, not text or objects") from None
        if array.dtype.kind not in "biuf":
            raise EvclError(f"{must}, not {array.dtype}")
        if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[1] == 0):
            raise EvclError(f"targets must have shape [examples] or [examples, targets], not {array.shape}")
        if len(array) != len(x):
            raise EvclError(f"there are {len(x)} inputs but {len(array)} targets")
        targets = torch.from_numpy(array.astype(np.float64)).reshape(len(x), -1)
        bad = ~(targets.abs() < MAX_TARGET) | self.wrong(targets)
        if bool(bad.any()):
            row = int(bad.any(1).nonzero()[0])
            value = float(targets[row][bad[row]][0])
            raise EvclError(f"{must}, but row {row} has {value:g}")
        return targets


def unbiased(draws: int) -> float:
    """The factor of a variance between this many draws: their mean is as near to them as any number can be."""
    return draws / max(1, draws - 1)
