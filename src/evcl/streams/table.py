"""A stream that learns a table: the learner, the encoder of its rows and the scores so far, saved in one file.

The file is that of `Stream.save` (`Stream.load` reads it too) with a second text in its metadata, and further tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evcl._core.errors import BadExample, EvclError
from evcl.streams import saved
from evcl.streams.alarm import Alarm
from evcl.streams.evaluation import Feed
from evcl.streams.files import TARGET, TIME, Files, RowDigest
from evcl.streams.prequential import Prequential
from evcl.streams.stream import Stream
from evcl.tables.encoding import Encoder
from evcl.tables.rows import LIKELIHOODS, present
from evcl.tables.saved import Note, OfTable, described_in, notes_of
from evcl.tables.source import Floats, Json, Piece, Target, bad

NOTE = Note("evcl.streams.table", (1,), "table/", "evcl.Stream.load")
WAITING = ("x", "y", "when")  # those of rows whose labels come late: inputs, targets, times


@dataclass(frozen=True)
class Raised:
    """An alarm in terms of the table: when it was raised, and which columns moved."""

    row: int  # from 1; rows without a label do not count
    when: float | None  # the time of that row, as in Files.times
    surprise: float
    columns: list[str]
    action: str
    reasons: list[str]  # for each of the columns: see Alarm


@dataclass(kw_only=True)
class TableStream(OfTable):
    """A stream and the table that it learns.

    `done` is how many rows of the files `identity` were predicted, and `learned` their digest; the learner may wait for
    the labels of the last ones. `unlabelled` rows had no label: they were passed over.
    """

    target: str
    stream: Stream
    kind: Target
    time: str | None = None
    dated: bool = False  # whether the time is a date
    scores: Prequential = field(default_factory=Prequential)
    done: int = 0
    unlabelled: int = 0
    identity: list[list[str]] = field(default_factory=list)
    learned: RowDigest = field(default_factory=RowDigest)
    raised: list[Raised] = field(default_factory=list)
    latest: float | None = None  # the time of the last row
    times: Floats = field(default_factory=lambda: np.zeros(0))  # those of the rows whose labels come late

    def __post_init__(self) -> None:
        self.feed = Feed(self.stream, self.scores)

    @staticmethod
    def create(files: Files, **settings: Any) -> TableStream:
        """A stream for files that nothing was learned of yet."""
        asked = files.asked
        encoder = Encoder.for_rows(files.kinds(), files.shapes())
        stream = Stream(likelihood=LIKELIHOODS[files.kind], **settings)
        scores = Prequential("classes" if files.kind == "class" else "numbers")
        made = TableStream(encoder, target=asked.target, stream=stream, kind=files.kind, time=asked.time, scores=scores)
        made.dated = asked.time is not None and files.kinds().get(asked.time) == "date"
        made.drop, made.missing, made.identity = tuple(asked.drop), asked.dialect.missing, files.identity
        return made

    def resume(self, files: Files) -> int:
        """The row of these files from which on to learn: where it stopped, if they begin with the rows that it learned
        last, whatever the files are called; 0 if they are all new. A file that was changed where it was learned is
        refused: which of its rows are new cannot be told.
        """
        begins = files.identity[: len(self.identity)] == self.identity
        whole = files.rows >= self.done
        learned = files.digest(self.done) if whole else RowDigest()
        differing = self.learned.differing(learned)
        if whole and not differing and (begins or self.learned.digests):
            self.identity, self.learned = files.identity, learned
            return self.done
        if begins and not whole:
            raise EvclError(f"the files have {files.rows:,} rows, but {self.done:,} were learned: did they shrink?")
        if begins:
            column = {TARGET: self.target, TIME: str(self.time)}.get(differing[0], differing[0])
            new = "at the end" if self.time is None else f"of a later {self.time}"
            raise EvclError(
                f"{self.identity[-1][0]}: the first {self.done:,} rows are not those that were learned (column "
                f"{column!r} differs), but only rows {new} can be new; if it is another file, give it another name"
            )
        if both := [name for name, digest in files.identity if [name, digest] in self.identity]:
            raise EvclError(f"{min(both)} was learned already: name it with the files before it, or leave it out")
        self.identity, self.done, self.learned = files.identity, 0, RowDigest()
        return 0

    def learn(self, files: Files, piece: Piece, delay: int = 0) -> list[Raised]:
        """Predict some rows, and learn those whose labels have come. Returns the alarms that they raised."""
        path, when = files.files[0].source.path, piece.columns[TIME]
        earlier = when < np.maximum.accumulate(
            np.concatenate([[-np.inf if self.latest is None else self.latest], when[:-1]])
        )
        if earlier.any():
            place = piece.place(int(earlier.argmax()))
            bad(
                path,
                place,
                f"it is earlier than rows that were learned already; --time {self.time} sorts new rows only",
            )
        columns = {name: values for name, values in piece.columns.items() if name not in (TARGET, TIME)}
        x, targets = self.encoder.encode(Piece(columns, piece.place, piece.rows), path), piece.columns[TARGET]
        there = present(targets)
        self.done += piece.rows
        self.learned.add(piece)
        self.unlabelled += int((~there).sum())
        self.latest = float(when[-1]) if self.time is not None else None
        if not there.any():
            return []
        y = self._places(targets) if self.kind == "class" else torch.from_numpy(np.asarray(targets, dtype=np.float64))
        before, self.feed.delay = len(self.stream.alarms), delay
        try:
            self.feed(torch.from_numpy(x[there]), y[torch.from_numpy(there)], self.labels or None)
        except BadExample as error:
            bad(path, piece.place(int(np.flatnonzero(there)[error.row])), error.what)
        if not delay:
            self.feed.end()  # rows that waited for an earlier, longer delay
        return self._told(before, np.concatenate([self.times, when[there]]))

    def end(self) -> list[Raised]:
        """Learn the rows that still wait for their labels."""
        before = len(self.stream.alarms)
        self.feed.end()
        return self._told(before, self.times)

    def _told(self, before: int, when: Floats) -> list[Raised]:
        """The alarms from number `before` on, in terms of the table; `when` are the times of the rows learned last, and
        of those that wait.
        """
        learned, names, found = len(when) - len(self.feed), self.encoder.inputs_of, []
        first, self.times = self.stream.rows - learned, when[learned:]
        for alarm in self.stream.alarms[before:]:
            moved = self._moved(alarm, names)
            time = float(when[min(len(when) - 1, max(0, alarm.row - first))]) if self.time is not None else None
            found.append(Raised(alarm.row + 1, time, alarm.surprise, list(moved), alarm.action, list(moved.values())))
        self.raised += found
        return found

    def _moved(self, alarm: Alarm, names: list[str]) -> dict[str, str]:
        """The columns of an alarm by name, and the reason of each. A column of several inputs is named once; that dates
        move is no news.
        """
        found, kinds = dict[str, str](), self.encoder.kinds()
        for place, reason in zip(alarm.columns, alarm.reasons, strict=True):
            name = names[place]
            if name and not (kinds.get(name) == "date" and reason == "inputs"):
                found.setdefault(name, reason)
        return found

    def _places(self, labels: Any) -> Tensor:
        for label in labels:
            if label is not None and label not in self.labels:
                self.labels.append(label)
        place = {label: i for i, label in enumerate(self.labels)}
        return torch.tensor([-1 if label is None else place[label] for label in labels])

    # --- the file ----------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        told, arrays = self.scores.state()
        text = {
            "format": NOTE.formats[-1],
            **self.described(),
            **{name: getattr(self, name) for name in _PLAIN},
            "encoder": self.encoder.rows_described(),
            "scores": told,
            "learned": self.learned.digests,
            "raised": [list(vars(one).values()) for one in self.raised],
        }
        tensors = {f"{NOTE.prefix}{name}": torch.from_numpy(array) for name, array in arrays.items()}
        if self.feed.waiting is not None:
            waiting = (*self.feed.waiting, torch.from_numpy(self.times.copy()))
            tensors |= {f"{NOTE.prefix}{name}": one.contiguous() for name, one in zip(WAITING, waiting, strict=True)}
        saved.save(self.stream, path, {NOTE.name: json.dumps(text)}, tensors)


_PLAIN = {  # the fields that JSON holds as they are, and their types
    "kind": str, "time": (str, type(None)), "dated": bool, "done": int, "unlabelled": int, "identity": list,
    "latest": (int, float, type(None)),
}  # fmt: skip


def is_stream(path: Path) -> bool:
    """Whether this is the file of a stream."""
    return saved.NOTE in notes_of(path)


def load(path: Path) -> TableStream:
    """Load a stream that `save` wrote. No code from the file is run."""
    stream = saved.load(path)
    with NOTE.opened(path) as (told, tensors):
        return _rebuilt(stream, told, {name.removeprefix(NOTE.prefix): one for name, one in tensors.items()})


def _rebuilt(stream: Stream, told: Json, tensors: Mapping[str, Tensor]) -> TableStream:
    if not isinstance(told["target"], str):
        raise ValueError("target")
    for name, types in _PLAIN.items():
        if not isinstance(told[name], types):  # type: ignore[arg-type]
            raise ValueError(name)
    scores = Prequential.restored(told["scores"], {name: tensors[name].numpy() for name in ("windows", "decayed")})
    encoder, plain = Encoder.rows_rebuilt(told["encoder"]), {name: told[name] for name in _PLAIN}
    found = TableStream(encoder, **described_in(told), **plain, stream=stream, scores=scores)
    found.identity = [[str(name), str(digest)] for name, digest in told["identity"]]
    found.learned = RowDigest({str(name): str(digest) for name, digest in told.get("learned", {}).items()})
    found.raised = [
        Raised(int(row), when and float(when), float(surprise), [*map(str, columns)], str(action), [*map(str, why)])
        for row, when, surprise, columns, action, why in told["raised"]
    ]
    fits = (
        LIKELIHOODS[found.kind] == stream.likelihood
        and stream.state is not None
        and stream.state.shape == (found.encoder.inputs,)
    )
    if not fits or any(type(label) is not int or not 0 <= label < len(found.labels) for label in stream.classes):
        raise EvclError("its columns and labels do not fit its network")
    if "x" in tensors:
        x, y, when = tensors["x"], tensors["y"], tensors["when"].numpy()
        if x.shape != (len(y), found.encoder.inputs) or when.shape != (len(y),) or not bool(torch.isfinite(x).all()):
            raise EvclError("its waiting rows do not fit")
        found.feed.waiting, found.times = (x, y), when
    return found
