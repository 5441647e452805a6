"""`evcl.Stream`: learns rows in the order in which they come, predicts before it learns, and notices changes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from evcl._core.errors import BadExample, EvclError
from evcl._core.inputs import Label, inputs, labels
from evcl._core.settings import SEED, Settings, read, resolve
from evcl.streams.alarm import Alarm, Columns, Detector
from evcl.streams.arrays import Array, Stateful, Values, finite, total, within
from evcl.streams.building import bank_of
from evcl.streams.forgetting import Looked
from evcl.streams.observing import parts
from evcl.streams.scaling import MAX_DEVIATIONS, Scaling, squashed
from evcl.targets import get as get_likelihood

SETTINGS = read(Path(__file__).with_name("settings.toml"))["stream"] | {"seed": SEED}
"""The settings of a stream, by name."""
OUTPUTS_AT_ONCE = 128  # outputs of all rows that are learned at once; more rows are learned in several steps
Rows = object  # what numpy or torch takes
MAX_INPUT = 1e100  # inputs must be smaller, so that their squares are finite
NP_DTYPES = (torch.float32, torch.float64)  # what numpy has, too

quiet = np.errstate(all="ignore")  # numbers that are not finite are found and dealt with where they matter


class Report(NamedTuple):
    """What happened when rows were learned.

    Attributes:
        rows: the number of rows learned so far
        surprise: -log p of the targets less what the learner expected, in nats, averaged over these rows
        alarm: the alarm that these rows raised, or None
    """

    rows: int
    surprise: float
    alarm: Alarm | None


class Numbers(NamedTuple):
    """Predictions of numbers or counts for n rows, each [n], or [n, D] if there are several targets.

    Attributes:
        mean: the expected value
        std: the standard deviation of a row's target around it
    """

    mean: Any
    std: Any


class State(Stateful):
    """All that rows have taught a stream, from the first one on: x [n, ...] are its first rows."""

    def __init__(self, stream: Stream, x: Array, outputs: int) -> None:
        self.shape: tuple[int, ...] = x.shape[1:]  # of a row
        self.targets = 0 if stream.likelihood == "categorical" else outputs  # of a row, if they are not classes
        self.bank = bank_of(stream, x, outputs)
        self.scaling = Scaling(x[0].size)
        self.target_scaling = Scaling(max(1, self.targets))
        self.detector = Detector(float(stream.settings.false_alarms))
        self.columns = Columns(x[0].size, outputs)

    def parts(self) -> dict[str, Stateful]:
        return {
            "bank": self.bank,
            "scaling": self.scaling,
            "targets": self.target_scaling,
            "alarm": self.detector,
            "columns": self.columns,
        }

    @quiet
    def restore(self, arrays: Mapping[str, Array]) -> None:
        super().restore(arrays)

    def grow(self, outputs: int) -> None:
        """Add outputs, for new classes."""
        self.bank.experts.grow(outputs)
        self.columns.grow(outputs)

    def squashed(self, x: Array) -> Array:
        """[n, columns]: the rows, standardised."""
        return squashed(self.scaling.scaled(x.reshape(len(x), -1)))


class Stream:
    """A learner without tasks, epochs or boundaries.

    `network`: any torch network; its outputs are features, on which a linear layer predicts. None: a network that
    suits most tables. `likelihood`: what is predicted, as for `evcl.Learner`. `classes`: those that are known in
    advance; others are added when they come. `memories`: how many rows each expert remembers, `inf` for one that
    forgets nothing; how much each counts is inferred. `noise`: the standard deviation of the targets' noise, if it is
    known; otherwise it is inferred. Other settings: see `evcl.streams.SETTINGS`.
    """

    def __init__(
        self,
        network: nn.Module | None = None,
        likelihood: str = "categorical",
        *,
        classes: Sequence[Label] = (),
        memories: Sequence[float] | None = None,
        noise: float | None = None,
        **settings: Any,
    ) -> None:
        if network is not None and not isinstance(network, nn.Module):
            raise EvclError(f"network must be a torch network or None, not {type(network).__name__}")
        self.network = network
        self._kind = get_likelihood(likelihood)
        self.likelihood = self._kind.name
        self.settings: Settings = resolve("Stream", SETTINGS, settings)
        self.memories = _memories(memories)
        self.noise = _noise(noise, self.likelihood)
        self.classes: list[Label] = labels(list(classes), len(classes)) if len(classes) else []
        if len(set(self.classes)) != len(self.classes) or (self.classes and self.likelihood != "categorical"):
            raise EvclError("classes must all differ, and only likelihood='categorical' has any")
        self._places = {label: i for i, label in enumerate(self.classes)}
        self.rows = 0
        self.alarms: list[Alarm] = []
        self.state: State | None = None
        self._last: tuple[Array, Looked] | None = None  # the rows predicted last; learning them needs no second look

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.likelihood!r}, seed={self.settings.seed}, {self.rows:,} rows learned)"

    @quiet
    def predict_proba(self, x: Rows) -> Any:
        """[n, classes]: the probability of each of `classes`; with likelihood="bernoulli", of each label, [n, D]."""
        if self.likelihood not in ("categorical", "bernoulli"):
            raise EvclError(f"likelihood={self.likelihood!r} has no probabilities: use predictions")
        return self._answer(self._predicted(self._inputs(x)), x)

    @quiet
    def predict(self, x: Rows) -> Any:
        """[n]: the most probable class; the expected value of a number or count; [n, D] for several targets."""
        out = self._predicted(self._inputs(x))
        if self.likelihood == "categorical":
            if not self.classes:
                raise EvclError("no class is known before the first row is learned")
            return np.array(self.classes)[out.argmax(1)]
        return _narrow((out > 0.5).astype(np.int64) if self.likelihood == "bernoulli" else self._numbers(out)[0], x)

    @quiet
    def predictions(self, x: Rows) -> Numbers:
        """Numbers or counts, with their uncertainty. Before the first row they are 0 and 1."""
        if self.likelihood not in ("gaussian", "poisson"):
            raise EvclError(f"likelihood={self.likelihood!r} has no numbers: use predict_proba")
        numbers: Numbers = self._answer(self._predicted(self._inputs(x)), x)
        return numbers

    @quiet
    def learn(self, x: Rows, y: object) -> Report:
        """Learn rows, each once. Labels that are new become new classes."""
        checked = self._inputs(x)
        return self._learn(checked, self._checked_targets(y, checked))

    @quiet
    def step(self, x: Rows, y: object) -> tuple[Any, Report]:
        """Predict, then learn: what `predict_proba` (or `predictions`) returns before the rows are learned, and the
        report.
        """
        checked = self._inputs(x)
        targets = self._checked_targets(y, checked)
        return self._answer(self._predicted(checked), x), self._learn(checked, targets)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole state to a safetensors file, from which `Stream.load` goes on bit for bit."""
        from evcl.streams.saved import save

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], network: nn.Module | None = None) -> Stream:
        """Load a saved stream. If its network was not an `evcl.nn.mlp` or the default, pass it."""
        from evcl.streams.saved import load

        return load(path, network)

    @property
    def shares(self) -> dict[float, float]:
        """How probable each memory is now: the number of rows -> the probability of the experts that remember them."""
        if self.state is None:
            return {}
        bank = self.state.bank
        shares = dict.fromkeys(bank.experts.memories, 0.0)
        for memory, share in zip(bank.experts.memories, bank.shares.shares.tolist(), strict=True):
            shares[memory] += share
        return shares

    # What a user hands in is checked first, so that an error leaves the state as it was.

    def _inputs(self, x: Rows) -> Array:
        """[n, ...], copied: a caller may use its memory again. A single row becomes a batch of one."""
        shape = None if self.state is None else self.state.shape
        given = x.numpy() if isinstance(x, Tensor) and x.dtype in NP_DTYPES and not x.requires_grad and x.is_cpu else x
        given = given if isinstance(given, Tensor) else np.asarray(given)
        one = given.ndim == 1 if shape is None else tuple(given.shape) == shape
        rows = given[None] if one else given
        if isinstance(rows, Tensor) or rows.dtype.kind != "f" or rows.ndim < 2 or not (rows.size and finite(rows)):
            rows = inputs(rows, torch.float64, "cpu").numpy()  # or it says what is wrong
        if shape is not None and rows.shape[1:] != shape:
            raise EvclError(f"a row had the shape {shape} at first, but now {rows.shape[1:]}")
        if (largest := np.maximum.reduce(np.abs(rows), None)) >= MAX_INPUT:
            raise EvclError(f"x has {largest:g}, but must be below {MAX_INPUT:g} in absolute value")
        return np.array(rows, np.float64, order="C")

    def _checked_targets(self, y: Any, x: Array) -> Any:
        """Labels as a list, or targets [n, D]."""
        if isinstance(y, str) or np.ndim(y) == 0:
            y = [y.item() if isinstance(y, (Tensor, np.generic)) else y]
        targets = self._kind.read(torch.from_numpy(x), y, "learn")
        if isinstance(targets, Tensor):
            if self.state is not None and targets.shape[1] != self.state.targets:
                raise EvclError(f"a row had {self.state.targets} targets at first, but now {targets.shape[1]}")
            return targets.numpy()
        if self.classes and type(targets[0]) is not type(self.classes[0]):
            kinds = type(self.classes[0]).__name__, type(targets[0]).__name__
            raise EvclError(f"labels were of type {kinds[0]} at first, but now {kinds[1]}")
        return targets

    # --- predicting --------------------------------------------------------------------------------------------------

    def _pieces(self, rows: Values) -> list[Values]:
        """The rows that are looked at and learned at once."""
        outputs = max(1, len(self.classes) - 1, self.state.targets if self.state else 0)
        size = max(1, OUTPUTS_AT_ONCE // outputs)
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def _looked(self, state: State, x: Array) -> Looked:
        if self._last is not None and self._last[0].shape == x.shape and (self._last[0] == x).all():
            return self._last[1]
        self._last = x, state.bank.look(state.squashed(x).reshape(x.shape) if self.settings.standardize else x)
        return self._last[1]

    def _predicted(self, x: Array) -> Array:
        """[n, ...]: what the bank predicts; before any row, all classes are equally probable."""
        if self.state is None:
            width = len(self.classes)
            return np.full((len(x), width), 1 / max(1, width))
        predicted = np.concatenate([self._looked(self.state, piece).together[0] for piece in self._pieces(x)])  # a copy
        if not finite(predicted) and not (fine := np.isfinite(predicted).all(1)).all():
            raise BadExample(
                "its prediction is not finite: its inputs are too large for the network", int(fine.argmin())
            )
        return predicted

    def _numbers(self, found: Array) -> tuple[Array, Array]:
        """[n, D] each: the mean and the standard deviation, in the units of the targets."""
        if self.state is None:
            return np.zeros((len(found), 1)), np.ones((len(found), 1))
        if self.likelihood == "poisson":
            mean, variance = parts(found, 2)
            return mean, np.sqrt(variance)
        mean, noise, uncertain = parts(found, 3)
        std, scaling = np.sqrt(noise + uncertain), self.state.target_scaling
        if not self.settings.standardize or not scaling.count:
            return mean, std
        return scaling.mean + scaling.std * mean, scaling.std * std

    def _answer(self, found: Array, x: Rows) -> Any:
        """A prediction as the user gets it: numbers, or probabilities."""
        if self.likelihood in ("gaussian", "poisson"):
            return Numbers(*(_narrow(one, x) for one in self._numbers(found)))
        return _as_given(found, x)

    # --- learning ----------------------------------------------------------------------------------------------------

    def _learn(self, x: Array, y: Any) -> Report:
        if self.likelihood == "categorical":
            new = [label for label in dict.fromkeys(y) if label not in self._places]
            before = len(self.classes)
            if self.state is None:
                self.state = State(self, x, before + len(new) - 1)
            elif new:
                self.state.grow(before + len(new) - max(1, before))
                self._last = None
            self.classes += new
            self._places |= {label: before + i for i, label in enumerate(new)}
            y = np.array([self._places[label] for label in y])
        elif self.state is None:
            self.state = State(self, x, y.shape[1])
        surprises, alarm = [], None
        for piece, own in zip(self._pieces(x), self._pieces(y), strict=True):
            surprise, raised = self._learn_piece(self.state, piece, own)
            surprises.append(surprise)
            alarm = alarm or raised
        return Report(self.rows, sum(surprises) / len(x), alarm)

    def _learn_piece(self, state: State, x: Array, y: Array) -> tuple[float, Alarm | None]:
        """The sum of the rows' surprises, and the alarm that they raised."""
        standardize, observing = bool(self.settings.standardize), state.bank.experts.observing
        if state.targets and not self.rows:
            own = Scaling(state.targets)
            own.add(y)
            observing.follow(own, standardize)
        target = y
        if self.likelihood == "gaussian" and standardize:
            target = within(state.target_scaling.scaled(y), -MAX_DEVIATIONS, MAX_DEVIATIONS)
        looked = self._looked(state, x)
        surprise = observing.surprise(looked.together, target)
        raised = state.detector.learn(observing.softer(looked.together, target))
        learned = state.bank.learn(looked, target, self.settings.inner_steps)
        self._last = None
        state.columns.learn(looked.x.reshape(len(x), -1) if standardize else state.squashed(x), learned.e, learned.b)
        state.scaling.add(x.reshape(len(x), -1))
        if state.targets:
            state.target_scaling.add(y)
            observing.follow(state.target_scaling, standardize)
        alarm = None
        if raised is not None:
            row, height = raised
            columns, reasons = state.columns.moved()
            action = _action(self.shares, learned.replaced)
            alarm = Alarm(self.rows + row, math.log(height), columns, action, reasons)
            self.alarms.append(alarm)
        self.rows += len(x)
        return float(total(surprise)), alarm


def _as_given(found: Values, x: Rows) -> Any:
    """A tensor if the rows x are one; otherwise an array."""
    return torch.from_numpy(found) if isinstance(x, Tensor) else found


def _narrow(found: Values, x: Rows) -> Any:
    """[n] of [n, 1]: a single target needs no second axis."""
    return _as_given(found[:, 0] if found.shape[1] == 1 else found, x)


def _memories(given: Sequence[float] | None) -> tuple[float, ...] | None:
    if given is None:
        return None
    memories = tuple(float(m) for m in given)
    if not memories or not all(m > 1 for m in memories):
        raise EvclError(f"memories must be numbers of rows above 1, or inf, not {given!r}")
    return memories


def _noise(given: float | None, likelihood: str) -> float | None:
    if given is None:
        return None
    if likelihood != "gaussian" or not 0 < float(given) < float("inf"):
        raise EvclError(f"noise must be a number above 0, with likelihood='gaussian', not {given!r}")
    return float(given)


def _action(shares: Mapping[float, float], replaced: list[tuple[float, float]]) -> str:
    """What the learner does about a change: which memory counts most now, and which experts start anew."""
    most = max(shares, key=lambda memory: shares[memory])
    clauses = [f"experts that remember {_rows(most)} have {shares[most]:.0%} of the weight"]
    clauses += [
        f"those that remember {_rows(slow)} go on from those that remember {_rows(fast)}" for slow, fast in replaced
    ]
    return "; ".join(clauses)


def _rows(memory: float) -> str:
    return "everything" if memory == float("inf") else f"{memory:,.0f} rows"
