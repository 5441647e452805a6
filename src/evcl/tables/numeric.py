"""Tables whose target is a number or a count: its rows, a task of it, and how good predictions are."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from evcl._core.errors import BadExample, EvclError
from evcl._core.tasks import Examples
from evcl.callbacks import Callback
from evcl.learner import Numbers
from evcl.tables.fitting import EncoderFitting
from evcl.tables.output_file import Column
from evcl.tables.rows import Labelled
from evcl.tables.source import Floats, Piece, Source, Unknown, bad
from evcl.tables.values import Where, numbers_of
from evcl.targets.scale import far_outside

if TYPE_CHECKING:
    from evcl.tables.model import Model

Target = Literal["class", "number", "count"]  # what a target is
LIKELIHOODS: dict[Target, str] = {"class": "categorical", "number": "gaussian", "count": "poisson"}
MEASURED = ("rmse", "nll", "coverage")  # on the held-out rows
UNSCALED = "the inputs are not scaled"  # a warning that is not for tables: the encoder scales their inputs


@dataclass
class NumberRows:
    """The targets of a file's rows that have one, [N] in float64."""

    values: Tensor
    labelled: Labelled


def targets_of(source: Source, piece: Piece, column: str, count: bool) -> Any:
    """[n] in float64: a piece's targets; NaN if missing."""
    where = Where(source.path, piece, column)
    values = piece.columns[column]
    if values.dtype.kind in "OM" or values.ndim > 1:
        what = "dates" if values.dtype.kind == "M" else "an array" if values.ndim > 1 else f"{values[0]!r}"
        where.bad(0, f"the target is a number, not {what}")
    found = numbers_of(values, where)
    wrong = (found < 0) | (found != np.round(found)) if count else np.zeros(len(found), dtype=bool)
    wrong &= ~np.isnan(found)
    if wrong.any():
        row = int(wrong.argmax())
        where.bad(row, f"{found[row]:g} is no count: a whole number of at least 0 is expected")
    return found


def read_numbers(source: Source, target: str, fitting: EncoderFitting | None, count: bool) -> NumberRows:
    """Read a file's targets in one pass and, for the first task, fit the encoder in the same pass."""
    if target not in source.shapes:
        has = ", ".join(map(repr, list(source.shapes)[:8]))
        bad(source.path, f"there is no column {target!r}, the target; it has {has}")
    found, labelled = [], Labelled()
    for piece in source.pieces([target] if fitting is None else [*fitting.names, target]):
        values = targets_of(source, piece, target, count)
        there = ~np.isnan(values)
        kept = labelled.see(piece, there, target)
        if fitting is not None and kept.rows:
            fitting.see(kept)
        found.append(values[there])
    labelled.check(source, target)
    return NumberRows(torch.from_numpy(np.concatenate(found)), labelled)


def learn_numbers(
    model: Model,
    source: Source,
    rows: NumberRows,
    name: str,
    shared: str,
    epochs: int | None,
    validation: float,
    unknown: Unknown,
    callbacks: Sequence[Callback],
    checkpoint: Path | None,
) -> dict[str, Any]:
    """`Model.learn` for a target that is a number or a count. `shared` is the task whose head to use, or "new"."""
    started = time.perf_counter()
    train, held = model.inputs(source, rows.labelled, rows.values, validation, unknown)
    before: Mapping[str, Any] = {}
    if held is not None and shared != "new":
        before = measured(model, held, shared, source)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", UNSCALED)
        warnings.filterwarnings("ignore", "targets far outside")  # the note names the place in the file
        model.learner.learn(train, name, shared, epochs, callbacks=callbacks, checkpoint=checkpoint)
    model.notes += _far_outside(source, rows, str(model.target))
    line = {
        "task": name,
        "file": source.path.name,
        "learned": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),  # in UTC
        "seconds": round(time.perf_counter() - started, 1),
        "examples": len(train),
        "held_out": 0 if held is None else len(held),
        "classes": 0,
        "known_before": 0,
        "rmse_before": before.get("rmse"),
        "deviation": float(rows.values.std(correction=0)),  # of the targets: what an RMSE is compared with
        **({} if held is None else measured(model, held, name, source)),
        "unfamiliar": before.get("unfamiliar"),  # of its rows, before it was learned
    }
    model.history.append(line)
    return line


def _far_outside(source: Source, rows: NumberRows, target: str) -> list[str]:
    """What to say of targets that are far outside the others, if there are any."""
    far = far_outside(rows.values.unsqueeze(1)).flatten().nonzero().flatten().tolist()
    if not far:
        return []
    left = far[0]
    for piece in rows.labelled.pieces(source, [target]):
        if left < piece.rows:
            break
        left -= piece.rows
    counted = "1 row has a target" if len(far) == 1 else f"{len(far):,} rows have targets"
    first = f"{piece.place(left)} has {float(rows.values[far[0]]):g}"
    return [f"{counted} far outside the others, learned as the largest or smallest of these: {first}"]


def measured(model: Model, held: Examples, task: str, source: Source) -> dict[str, Any]:
    """RMSE, NLL, the coverage of 95% intervals and the median of `unfamiliar`."""
    try:
        found = model.learner.measure((held.x, held.y), task)
        unfamiliar = model.learner.predictions(held.x, task).unfamiliar
    except BadExample as error:
        bad(source.path, "a row that was held out", error.what)
    far = None if unfamiliar is None else float(unfamiliar.median())
    return {**found._asdict(), "unfamiliar": far}


def number_columns(found: Numbers) -> dict[str, Column]:
    """The columns of predictions of numbers or counts."""
    low, high = found.interval(0.95)
    columns = {"prediction": found.mean, "std": found.std, "low_95": low, "high_95": high, "epistemic": found.epistemic}
    written = {name: Column(_rounded(np.asarray(values, dtype=float), found.std)) for name, values in columns.items()}
    if found.unfamiliar is not None:
        written["unfamiliar"] = Column(found.unfamiliar, 3)
    return written


def _rounded(values: Floats, std: Any) -> Floats:
    """Numbers with 7 significant digits, and at least 3 of those that their standard deviations have."""
    with np.errstate(divide="ignore", invalid="ignore"):
        more = np.ceil(np.log10(np.abs(values) / np.asarray(std, dtype=float))) + 3
    digits = np.clip(np.nan_to_num(more, nan=7, posinf=7, neginf=7), 7, 17).astype(int)
    pairs = zip(values.tolist(), digits.tolist(), strict=True)
    return np.array([float(f"{value:.{count}g}") for value, count in pairs])


def check_kind(kind: Any) -> Target:
    """The kind of a target, or an error."""
    if kind not in LIKELIHOODS:
        raise EvclError(f"--kind must be {', '.join(list(LIKELIHOODS)[:-1])} or count, not {kind!r}")
    return kind  # type: ignore[no-any-return]
