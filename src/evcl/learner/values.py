"""Predictions of values, numbers, counts and labels, by a learner: see `evcl.targets.values`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from evcl._core.errors import EvclError
from evcl.learner.reading import INFER, in_form
from evcl.targets.answers import Numbers, Outcome, Predictions

if TYPE_CHECKING:
    from evcl.learner.state import State

TESTED = 2000  # at most this many rows of a task are predicted before they are learned


def draws(state: State) -> int:
    """How many draws of the weights a prediction averages over."""
    run = state.run
    return int(run.settings.get("predict_samples", 1)) if run.network.posterior.log_std is not None else 1


def outcome(state: State, x: Tensor, task: str | int | None) -> Outcome:
    """The prediction for x [N, ...], averaged over draws."""
    if task == INFER:
        raise EvclError("the task can be inferred from class probabilities only: choose a task")
    run, name, number = state.run, state.head(task), state.number(task)
    head = state.session.groups[name][0].number
    (averaged,) = state.tried(x, lambda x: [run.predict(x, head, task=number)])
    return run.likelihood.outcome(averaged, state.session.scales[name], draws(state))


def widened(state: State, x: Tensor, task: str | int | None) -> Outcome:
    """`outcome`, with more epistemic variance for rows that have values outside the range of the training rows.

    Data say nothing about the function there. Let x' be the nearest row within the range, e the distance between both
    (see `Density.within`), f the mean that the network predicts, and s the deviation of the targets; of counts, their
    mean. The function may change as the network does beyond the edge of the data, or not at all, or by s per deviation
    of the inputs as it does within the data on average. So the variance grows by (f(x) - f(x'))^2 + (e s)^2.
    """
    found, seen, run = outcome(state, x, task), state.session.density, state.run
    name = state.head(task)
    spread = run.likelihood.spread(run.network, state.session.groups[name][0].number, state.session.scales[name])
    if spread is None or seen is None or len(seen.mean) != x[0].numel():
        return found
    moved, far = seen.within(x)
    rows = far.nonzero().flatten()
    if not len(rows):
        return found
    return found.widened(rows, outcome(state, moved[rows], task), far[rows].unsqueeze(1), spread)


def predictions(state: State, x: Any, task: str | int | None) -> Predictions | Numbers:
    """`Learner.predictions` for values."""
    checked = state.inputs(x)
    first = {head: name for name, head in reversed(state.session.tasks.items())}
    tasks = np.full(len(checked), first[state.head(None if task == INFER else task)])
    found = widened(state, checked, task)
    shaped = [in_form(x, one[:, 0] if one.shape[1] == 1 else one) for one in found.parts]
    return found.answer([*shaped, tasks, state.unfamiliar(x, checked, found.doubt)])


def new_errors(state: State, x: Tensor, y: Tensor, weights: Tensor | None, head: str) -> Tensor:
    """[n, D]: the squared errors, without the part that uncertain weights explain, on rows that were not learned from,
    x and y [N, D], or on some of them; of counts, as multiples of the rate. They are multiplied by `weights` [N].
    """
    step = math.ceil(len(y) / TESTED)
    some, wanted = x[::step], y[::step]
    task = next(name for name, own in state.session.tasks.items() if own == head)
    errors = outcome(state, some, task).errors(wanted.to(some.device))
    return errors if weights is None else weights[::step].to(errors).unsqueeze(1) * errors
