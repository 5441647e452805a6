"""The encoding of a table's columns as network inputs.

An encoder is a list of parts (`parts.py`), in the order of the inputs. Each part encodes one column, and a column may
have several.

That of a model of tasks is fitted on the first task, and only ever extended. A number is standardised with the mean and
standard deviation of the first task. A missing one becomes the mean; if there were missing values, an extra input marks
them. A category becomes one input per text (one-hot), all 0 for a missing value. A date becomes its distance from the
first task's mean date, and points on circles: the year, the week, the day. Images, and arrays of more than two axes,
have one mean and standard deviation for all their values. What a later file brings (texts, columns, missing values,
numbers far outside) is a part at the end. Its inputs are 0 for every row learned before, so it changes no prediction
for those rows.

A row is encoded in the same way whenever it comes, and whether it has no value in a column or its file has no such
column. So rows that lack a column which comes later, or whose missing values were not marked, fix what a missing value
is from then on: all inputs of the column are 0 (`lacked`). An input of a column that comes later marks its values, and
not those that are missing.

That of a stream is updated by each row (`for_rows`): nothing is known of later rows, and what is known fits a fixed
size. Everything that is not known in advance has an input of its own in a pool of spare inputs: each text of a
category, the missing values of a column, a column that comes later. When the pool is full, further ones share its
inputs (the hashing trick), so that the network never has to grow.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from evcl._core.bounds import MOST_INPUTS
from evcl._core.errors import EvclError
from evcl.tables.outside import Ends
from evcl.tables.parts import Category, Inputs, Part, Updated, described, rebuilt, updated
from evcl.tables.source import Json, Kind, Piece, Source, Unknown, Values, bad, kind_of, listed, plural
from evcl.tables.values import Where

DEVIATIONS = 1e6  # from the known mean: beside a number farther out, float32 loses all else of its row
BEYOND = f"more than {DEVIATIONS:,.0f} standard deviations from what was learned"
SPARE, PER_TEXT = 4, 16  # spare inputs: for anything, and for each column of texts
MOST_SPARE = 512


class Encoder:
    """Encodes columns as inputs, in the order of its parts; the last `spare` ones are for what is not known in advance.

    `slots`: those of the spare inputs that are taken, by column and text; None: missing values; "": a later column.
    """

    def __init__(self, parts: Sequence[Part], spare: int = 0, slots: Mapping[tuple[str, str | None], int] = {}) -> None:
        self.columns: list[Part] = []
        self._parts: dict[str, list[tuple[int, Part]]] = {}  # of each column, with the place of its first input
        self._known: dict[str, set[str]] = {}
        self._first, self._spare, self._slots = 0, spare, dict(slots)
        for part in parts:
            self._add(part)
        if not 0 < self.inputs <= MOST_INPUTS:
            raise EvclError(f"{self.inputs:,} inputs to the network, but only 1 to {MOST_INPUTS:,} are possible")

    def _add(self, part: Part) -> None:
        late = self._slots.get((part.name, "")) if part.inputs else None
        self._parts.setdefault(part.name, []).append((self._first if late is None else late, part))
        self._first += part.inputs if late is None else 0
        self.columns.append(part)
        if isinstance(part, Category):
            self._known.setdefault(part.name, set()).update(part.texts)

    @property
    def inputs(self) -> int:
        """The number of inputs: those of the parts, and spare ones."""
        return self._first + self._spare

    @property
    def names(self) -> list[str]:
        return list(self._parts)

    @property
    def inputs_of(self) -> list[str]:
        """The column of each input, such as "sky" or, of a spare one, "sky=clear"; one that is free has no name."""
        found = [""] * self.inputs
        for name, own in self._parts.items():
            for place, part in own:
                found[place : place + part.inputs] = [name] * part.inputs
        for (name, text), place in self._slots.items():
            found[place] = name if text == "" else f"{name} missing" if text is None else f"{name}={text}"
        return found

    def parts(self, name: str) -> list[Part]:
        """The parts of a column; the first one is what the column was when it came."""
        return [part for _, part in self._parts.get(name, ())]

    def texts(self, name: str) -> set[str]:
        """All texts of a category that have an input."""
        return self._known.get(name, set())

    def kinds(self) -> dict[str, Kind]:
        """What each column holds."""
        return {name: own[0][1].holds for name, own in self._parts.items()}

    def check(self, source: Source, extra: Collection[str]) -> tuple[list[str], list[str]]:
        """The model's columns that a file lacks, and the file's columns that the model does not know; those in `extra`
        do not count. Raises if a column has another shape, or if the file has none of the model's columns.
        """
        shapes = source.shapes
        gone = [name for name in self.names if name not in shapes]
        new = [name for name in shapes if name not in self.names and name not in extra]
        if len(gone) == len(self.names):
            bad(source.path, f"there is no column {lacking(gone, new)}")
        self.check_shapes(source)
        return gone, new

    def check_shapes(self, source: Source) -> None:
        """Raise if a column has another shape than the model's."""
        for name, own in self._parts.items():
            wanted = getattr(own[0][1], "shape", ())
            if (shape := source.shapes.get(name, wanted)) != wanted:
                bad(source.path, f"column {name!r}", f"its values have shape {shape}, not {wanted}")

    def encode(
        self,
        piece: Piece,
        path: Path,
        learn: bool = True,
        unseen: defaultdict[str, Counter[str]] | None = None,
        ends: Mapping[str, Ends] = {},
    ) -> Inputs:
        """The rows of a piece as inputs [rows, inputs]. A column that the piece lacks is missing. `unseen` counts
        unknown categories, which are missing too; without it, they are errors. `ends`: of columns whose numbers far
        outside are limited. If `learn` is False, parts that are updated stay as they are, and what they do not know has
        no input.
        """
        out = np.zeros((piece.rows, self.inputs), dtype=np.float64 if self._spare else np.float32)
        for name in dict.fromkeys((*piece.columns, *self.names)) if self._spare else self.names:
            values, counted = piece.columns.get(name), None if unseen is None else unseen[name]
            if name not in self._parts and learn and values is not None:
                self._later(name, values)
            for place, part in self._parts.get(name, ()):
                into = out[:, place : place + part.inputs]
                where = Where(path, piece, name, self.texts(name), counted, ends.get(name), learn)
                for rows, text in (part.absent(into) if values is None else part.encode(values, into, where)) or ():
                    out[rows, self._slot(name, text, learn)] = 1.0
                counted = None if unseen is None else Counter()  # the first part has counted them
        return out

    def _slot(self, name: str, text: str | None, learn: bool) -> slice:
        """The input of something that was not known in advance: its own, or a shared one if all are taken. No input if
        `learn` is False, and there is none yet.
        """
        place = self._slots.get((name, text))
        if place is None and len(self._slots) >= self._spare:
            place = self._first + zlib.crc32(f"{name}={text}".encode()) % self._spare
        elif place is None and not learn:
            return slice(0)
        elif place is None:
            place = self._slots[name, text] = self._first + len(self._slots)
        return slice(place, place + 1)

    def _later(self, name: str, values: Values) -> None:
        """A column that comes later: its own input if one is left. Dates, and numbers without an input, are ignored."""
        kind = kind_of(values)
        if kind == "number" and values.ndim == 1 and len(self._slots) < self._spare:
            self._slot(name, "", True)
        elif kind != "text":
            return
        self._add(updated(kind, name))

    def described(self) -> list[Json]:
        """Its parts as JSON."""
        return [described(part) for part in self.columns]

    @staticmethod
    def rebuilt(saved: Sequence[Json]) -> Encoder:
        """The encoder from its description. Raises EvclError, KeyError or TypeError if the description is invalid."""
        return Encoder([rebuilt(one) for one in saved])

    # --- updated by rows ---------------------------------------------------------------------------------------------

    @staticmethod
    def for_rows(kinds: Mapping[str, Kind], shapes: Mapping[str, tuple[int, ...]] = {}) -> Encoder:
        """An encoder that is updated by each row, of which none has come. `kinds` says what each column holds; `shapes`
        the shape of its values, () if it is not given.
        """
        if not kinds:
            raise EvclError("there is no column to learn from")
        for name in (name for name, kind in kinds.items() if shapes.get(name, ()) and kind != "number"):
            raise EvclError(f"column {name!r} holds arrays, but not of numbers")
        spare = min(SPARE + PER_TEXT * sum(kind == "text" for kind in kinds.values()), MOST_SPARE)
        return Encoder([updated(kind, name, shapes.get(name, ())) for name, kind in kinds.items()], spare)

    def rows_described(self) -> Json:
        """Everything that an encoder of rows knows, for JSON."""
        columns = [
            part.described(place) for own in self._parts.values() for place, part in own if isinstance(part, Updated)
        ]
        slots = [[name, text, place] for (name, text), place in self._slots.items()]
        return {"columns": columns, "first": self._first, "spare": self._spare, "slots": slots}

    @staticmethod
    def rows_rebuilt(saved: Json) -> Encoder:
        """An encoder of rows from its description. Raises EvclError if this is none."""
        try:
            slots = {(str(name), None if text is None else str(text)): int(at) for name, text, at in saved["slots"]}
            first, spare = int(saved["first"]), int(saved["spare"])
            if list(slots.values()) != list(range(first, first + len(slots))) or len(slots) > spare:
                raise ValueError("its spare inputs")
            if not (saved["columns"] and 0 < spare <= MOST_SPARE):
                raise ValueError("its sizes")
            found = Encoder([Updated.rebuilt(*one) for one in saved["columns"]], spare, slots)
            if found.rows_described() != saved:
                raise ValueError("its columns")
        except (EvclError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise EvclError(f"the description of its columns is damaged ({error})") from error
        return found


class Encoding:
    """Encodes the rows of one file, and notes what the user should know of them. With `unknown` "error", a category
    that the encoder does not know is an error, and so is a number too far from all others; else they are missing.
    """

    def __init__(self, encoder: Encoder, source: Source, unknown: Unknown, ends: Mapping[str, Ends] = {}) -> None:
        self._encoder, self._source, self._ends, self._strict = encoder, source, ends, unknown == "error"
        self._unseen = None if self._strict else defaultdict[str, Counter[str]](Counter)
        self._far, self._first = 0, ""  # how many numbers are too far away, and where the first one is

    def __call__(self, piece: Piece) -> Inputs:
        """The rows of a piece [rows, inputs]."""
        return self._encoder.encode(piece, self._source.path, unseen=self._unseen, ends=self._ends)

    def near(self, inputs: Inputs, piece: Piece) -> Inputs:
        """The encoded rows, where inputs that are too far away are 0, as if missing; the same array if none is."""
        far = np.abs(inputs) > DEVIATIONS
        if not far.any():
            return inputs
        row, i = np.argwhere(far)[0].tolist()
        name = self._encoder.inputs_of[i]
        value, place = piece.columns[name][row], f"{piece.place(row)}, column {name!r}"
        what = "a number" if np.ndim(value) else str(value)
        if self._strict:
            bad(self._source.path, place, f"{what} is {BEYOND}; --unknown learn or missing accepts it")
        self._first = self._first or f"{place} has {what}"
        self._far += int(far.sum())
        return np.where(far, np.float32(0), inputs)

    @property
    def notes(self) -> list[str]:
        unseen = [
            f"{listed([repr(text) for text in found])} of {name}: not known, and counted as missing in "
            f"{plural(sum(found.values()), 'row')}"
            for name, found in (self._unseen or {}).items()
            if found
        ]
        if not self._far:
            return unseen
        verb = "is" if self._far == 1 else "are"
        return [*unseen, f"{plural(self._far, 'value')} {verb} {BEYOND}, and counted as missing: {self._first}"]


def lacking(gone: Sequence[str], new: Sequence[str]) -> str:
    """The names of columns that a file lacks, and what it has in their place."""
    more = f" (it has {listed([repr(name) for name in new])} instead)" if new else ""
    return f"{listed([repr(name) for name in gone])}, which the model learned from{more}"
