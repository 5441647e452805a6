"""A model for tables: a learner, the encoder of its inputs, and the history of learned tasks, all saved in one file.

The file is a learner's file (`evcl.load` reads it too) with a second text in its metadata: the encoder, the names of
the labels, and one line per task. The text is padded, so that the file grows in blocks and not with each task.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from evcl._core.bounds import MOST_CLASSES
from evcl._core.errors import BadExample, EvclError, ForgettingWarning
from evcl._core.inputs import positions
from evcl._core.randomness import Purpose, generator
from evcl._core.tasks import Examples, stratified
from evcl.learner import Learner, load
from evcl.learner.persist import now, write
from evcl.metrics import expected_calibration_error
from evcl.tables.asked import Learning
from evcl.tables.earlier import (
    MOST_SUMMARIES,
    SUMMARY,
    Now,
    Summary,
    advice,
    checked,
    read_summaries,
    standing,
    summarised,
    tensors_of,
)
from evcl.tables.encoding import Encoder, Encoding, lacking
from evcl.tables.fitting import EncoderFitting
from evcl.tables.rows import LIKELIHOODS, Rows, read_rows
from evcl.tables.saved import Note, OfTable, described_in, notes_of
from evcl.tables.source import Json, Kind, Source, Target, Unknown, absent, bad, listed
from evcl.targets.scale import far_outside

TABLE_NOTE = Note("evcl.tables", (1, 2), SUMMARY, "evcl.load")
BLOCK_BYTES = 16_384  # the padded text is a multiple of this
MEASURED = ("accuracy", "nll", "entropy", "epistemic")  # on the held-out rows
MEASURED_NUMBERS = ("rmse", "nll", "coverage")
UNSCALED = "the inputs are not scaled"  # a warning that is not for tables: the encoder scales their inputs
MOST_HELD = 10_000  # at most this many rows are held out, however large the file


@dataclass(kw_only=True)
class Model(OfTable):
    learner: Learner
    history: list[Json] = field(default_factory=list)  # one entry per task
    summaries: dict[str, Summary] = field(default_factory=dict)  # of the last tasks: see earlier.py
    now: dict[str, Now] = field(default_factory=dict)  # what each task is at, after the last one
    usual: tuple[str | None, bool | None] = (None, None)  # how the last files of text were read: see `Dialect`
    kind_given: bool = False  # whether the user said what the target is

    # --- learning --------------------------------------------------------------------------------------------------

    @property
    def numeric(self) -> bool:
        """Whether the target is a number or a count, not a class."""
        return self.kind != "class"

    @property
    def kind(self) -> Target:
        """What the target is."""
        return {likelihood: kind for kind, likelihood in LIKELIHOODS.items()}.get(self.learner.likelihood, "number")

    def learn(
        self, source: Source, rows: Rows, name: str, asked: Learning, checkpoint: Path | None = None
    ) -> tuple[Json, list[str]]:
        """Learn one more task from a file whose targets have been read; returns its entry in the history, and what the
        user should know of it. `checkpoint`: see `Learner.learn`.
        """
        if name in self.learner.tasks:
            raise EvclError(f"{name!r} is already learned: if this is another task, name it with --task")
        started, earlier, head = time.perf_counter(), self.learner.tasks, asked.head
        if head not in (None, "new", *earlier):
            known_heads = f"it has learned {', '.join(earlier[:8])}" if earlier else "this is its first task"
            raise EvclError(f"--head {head}: the model has learned no such task; {known_heads}")
        shared = "new" if head == "new" or not earlier else head or earlier[-1]
        labels = [*self.labels, *sorted(set(rows.names) - set(self.labels))]
        if len(labels) > MOST_CLASSES:
            bad(source.path, f"with it there would be {len(labels):,} classes, but the maximum is {MOST_CLASSES:,}")
        y = rows.targets(labels)
        train, held, notes = self.examples(source, rows, y, asked)
        before: Json = {}
        if held is not None and earlier and not (self.numeric and shared == "new"):
            before = self._measured(held, earlier[-1] if shared == "new" else shared, source)
        known = () if shared == "new" or self.numeric else self.learner.classes(shared)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ForgettingWarning)  # the notes name its labels,
            warnings.filterwarnings("ignore", "targets far outside")  # and the place in the file
            warnings.filterwarnings("ignore", UNSCALED)
            classes = None if self.numeric else tuple(sorted({*map(int, known), *y.tolist()}))
            self.learner.learn(
                train,
                task=name,
                head=shared,
                epochs=asked.epochs,
                classes=classes,
                callbacks=asked.callbacks,
                checkpoint=checkpoint,
            )
        known_before, self.labels = len(self.labels), labels
        line = {
            "task": name,
            "file": source.path.name,
            "learned": now(),
            "seconds": round(time.perf_counter() - started, 1),
            "examples": len(train),
            "held_out": 0 if held is None else len(held),
            "classes": 0 if self.numeric else len(train.y.unique()),
            "known_before": known_before,  # number of labels before this task; later ones came with it
        }
        if self.numeric:
            line["rmse_before"] = before.get("rmse")
            line["deviation"] = float(rows.values.std(correction=0))  # of the targets: what an RMSE is compared with
        else:
            line["accuracy_before"] = None if shared == "new" else before.get("accuracy")
        line |= {} if held is None else self._measured(held, name, source)
        self.history.append({**line, "unfamiliar": before.get("unfamiliar")})  # of its rows, before it was learned
        if self.numeric:
            return self.history[-1], notes + _far_outside(source, rows, str(self.target))
        lacking = [repr(labels[int(code)]) for code in self.learner.lacking]
        forgetting = self.learner.forgetting(name, lacking, "--keep 200")
        notes += [] if forgetting is None else [forgetting]
        if (summary := summarised(self, train.x, train.y, name)) is not None:
            self.summaries = dict([*self.summaries.items(), (name, summary)][-MOST_SUMMARIES:])
        before_it, self.now = self.now, standing(self)
        return self.history[-1], notes + advice(self, before_it)

    def see(self, source: Source, drop: Collection[str] = (), unknown: Unknown = "learn") -> Rows:
        """Read a later file's targets, and extend the encoder and the network by what is new in its columns."""
        gone, new, notes = self.check(source, drop, unknown)
        if source.images:
            return read_rows(source, self.target, "class")
        names = [name for name in self.encoder.names if name not in gone and source.shapes[name] == ()]
        new = [name for name in new if source.shapes[name] == ()] if unknown == "learn" else []
        fitting = EncoderFitting(source, [*names, *new], known=self.encoder)
        rows = read_rows(source, self.target, self.kind, fitting, self.labels)
        rows.notes = notes
        if unknown != "learn":
            self.encoder = fitting.unextended()
            return rows
        encoder, rows.ends = fitting.encoder(), fitting.ends
        more, notes[len(notes) :] = encoder.inputs - self.encoder.inputs, fitting.limited
        try:
            self.learner = self.learner.with_inputs(more) if more else self.learner  # predictions for earlier rows stay
        except EvclError as error:
            notes.append(f"what is new counts as missing: {error}")
        else:
            self.encoder = encoder
            notes += fitting.notes
        return rows

    def examples(
        self, source: Source, rows: Rows, y: Tensor, asked: Learning
    ) -> tuple[Examples, Examples | None, list[str]]:
        """The file's training and held-out examples, each written directly to its place: nothing is in memory twice;
        and what the user should know of them. `y` has the targets of the rows.
        """
        count = min(round(asked.validation * len(y)), MOST_HELD, len(y) - 1)
        held = torch.zeros(len(y), dtype=torch.bool)
        if count > 0:
            drawn = generator(self.learner.seed, Purpose.VALIDATION, len(self.learner.tasks))
            numeric = y.is_floating_point()
            held[torch.randperm(len(y), generator=drawn)[:count] if numeric else stratified(y, count, drawn)[1]] = True
        x, places, start = torch.empty(len(y), self.encoder.inputs), held.sort(stable=True).indices.argsort(), 0
        encoding = Encoding(self.encoder, source, asked.unknown, rows.ends)
        for piece in rows.labelled.pieces(source, [name for name in self.encoder.names if name in source.shapes]):
            x[places[start : start + piece.rows]] = torch.from_numpy(encoding.near(encoding(piece), piece))
            start += piece.rows
        trained = len(y) - int(held.sum())  # these come first
        train, tested = Examples(x[:trained], y[~held]), Examples(x[trained:], y[held]) if count > 0 else None
        return train, tested, [*([rows.labelled.note] if rows.labelled.note else []), *encoding.notes]

    def _measured(self, held: Examples, task: str, source: Source) -> Json:
        """How good a task's head is on examples: of classes, the mean accuracy, NLL, entropy and epistemic uncertainty,
        the last three in nats; of numbers, RMSE, NLL and the coverage of 95% intervals. And how unfamiliar the examples
        are: the median, None if that is unknown.
        """
        try:
            answer = self.learner.predictions(held.x, task)
            measured = self.learner.measure((held.x, held.y), task)._asdict() if self.numeric else {}
        except BadExample as error:
            bad(source.path, "a row that was held out", error.what)
        far = None if answer.unfamiliar is None else float(answer.unfamiliar.median())
        if not self.numeric:
            columns = positions(held.y.tolist(), self.learner.classes(task), unknown=-1)
            p = answer.probabilities.gather(1, columns.clamp(min=0).unsqueeze(1)).squeeze(1).double()
            nll = -torch.where(columns < 0, 0.0, p).clamp(min=1e-12).log()
            means = ((answer.labels == held.y).double(), nll, answer.entropy.double(), answer.epistemic.double())
            measured = {name: float(mean.mean()) for name, mean in zip(MEASURED, means, strict=True)}
            p_known = np.concatenate([answer.probabilities.double().numpy(), np.zeros((len(columns), 1))], 1)
            measured["ece"] = expected_calibration_error(p_known, columns.numpy())
        return {**measured, "unfamiliar": far}

    def check(self, source: Source, drop: Collection[str], unknown: Unknown) -> tuple[list[str], list[str], list[str]]:
        """The columns that a file lacks, those that are new, and what the user should know of both: errors if `unknown`
        is "error". It may also have the target and dropped columns. From here on, its columns are read as what the
        model has learned them as.
        """
        if source.images != (self.target is None):
            wanted, came = ("images", "a table") if self.target is None else ("tables", "a folder of images")
            bad(source.path, f"the model learns from {wanted}, but this is {came}")
        if wrong := sorted({*drop} & {*self.encoder.names, str(self.target)}):
            raise EvclError(f"--drop {wrong[0]}: the model learns from this column")
        own = [] if self.target is None else [self.target]
        gone, new = self.encoder.check(source, {*self.drop, *drop, *own})
        kinds: dict[str, Kind] = dict.fromkeys(own, "number" if self.numeric else "text")
        source.expect({**self.encoder.kinds(), **kinds}, self.target)
        if unknown == "error" and gone:
            bad(source.path, f"there is no column {lacking(gone, new)}")
        if unknown == "error" and new:
            names = listed([repr(name) for name in new])
            bad(source.path, f"the model does not know column {names}; --unknown learn learns it, --drop leaves it out")
        notes = absent(gone, new) if gone else []
        if arrays := [name for name in new if source.shapes[name]]:
            notes.append(f"column {listed(arrays)} is not used: arrays that come later are not learned")
        if new and unknown == "missing":
            notes.append(f"column {listed(new)} is not used: the model has not learned it")
        return gone, new, notes

    # --- the file --------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        plain = {**self.described(), "now": self.now, "usual": self.usual, "kind_given": self.kind_given}
        text = json.dumps(
            {"format": TABLE_NOTE.formats[-1], **plain, "columns": self.encoder.described(), "history": self.history}
        )
        # The learner's own text grows with the names of the tasks, so both texts together are padded to whole blocks.
        # The file stores them inside JSON, with a backslash for each quote, so sizes are measured on the escaped texts.
        described = self.learner.described()
        size = len(json.dumps(text)) + len(json.dumps(json.dumps(described[0])))
        own = tensors_of(self.summaries, self.learner.tasks)
        write(path, (described[0], {**described[1], **own}), {TABLE_NOTE.name: text + " " * (-size % BLOCK_BYTES)})


def _far_outside(source: Source, rows: Rows, target: str) -> list[str]:
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


def is_table(path: Path) -> bool:
    """Whether this model file says how to encode a table, as those of `evcl learn` do."""
    return TABLE_NOTE.name in notes_of(path)


def _check_numbers(line: Json, names: Collection[str], more: Collection[str]) -> None:
    """Raise unless these values of an entry of the history are finite numbers; `more`: if it has them."""
    for name in (*names, *(one for one in more if one in line), "held_out"):
        if type(line[name]) not in (int, float) or not math.isfinite(line[name]):
            raise EvclError(f"its history should have a number as {name}")


def load_model(path: Path) -> Model:
    """Load a model that `save` wrote. No code from the file is run."""
    learner = load(path)
    with TABLE_NOTE.opened(path) as (saved, tensors):
        encoder, history = Encoder.rebuilt(saved["columns"]), saved["history"]
        model = Model(encoder, **described_in(saved), learner=learner, history=history)
        model.usual, model.kind_given = tuple(saved.get("usual", (None, None))), saved.get("kind_given", False) is True
        if len(model.usual) != 2 or model.usual[0] not in (None, ".", ",") or model.usual[1] not in (None, False, True):
            raise EvclError("its usual form of numbers and dates is not known")
        for line in history:
            if not isinstance(line["task"], str) or not isinstance(line["learned"], str):
                raise EvclError("its tasks should be text")
            own_measures = MEASURED_NUMBERS if model.numeric else MEASURED
            needed = ("examples", *(own_measures if line["held_out"] else ()))
            _check_numbers(line, needed, ("ece", "seconds", "deviation"))
        codes, labels = [int(code) for task in learner.tasks for code in learner.classes(task)], len(model.labels)
        fits = not labels and set(codes) == {0} if model.numeric else codes and 0 <= min(codes) <= max(codes) < labels
        if not fits:
            raise EvclError("its labels do not fit its heads")
        learner.predict(np.zeros((1, encoder.inputs)), task=0)  # raises if the sizes do not match
        model.summaries = read_summaries(tensors, learner.tasks, encoder.inputs, labels)
        model.now = checked(saved.get("now", {}), learner.tasks)
    return model
