"""What the commands for models share: options, and printing of facts, one per line, or of one JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evcl.cli.options import Usage
from evcl.cli.progress import echo, print_line

if TYPE_CHECKING:
    from evcl import tables
    from evcl.tables.source import Dialect

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Quiet = Annotated[bool, "Print nothing, except errors."]


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """The options of commands that read a user's files."""

    drop: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Leave this column out. May be repeated.")
    ] = None
    separator: Annotated[str | None, "What separates columns: ; or tab or space [detected]."] = None
    decimal: Annotated[str | None, "The decimal sign, . or , [detected]."] = None
    missing: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A text or number that means a missing value. May be repeated."),
    ] = None
    query: Annotated[str | None, "SQL that selects the rows, if the data is a DuckDB database."] = None
    as_json: AsJson = False
    quiet: Quiet = False

    def dialect(self) -> Dialect:
        """How texts of the file are written."""
        from evcl.tables.source import Dialect

        named = {"tab": "\t", "\\t": "\t", "space": " ", "comma": ","}
        separator = None if self.separator is None else named.get(self.separator, self.separator)
        if separator is not None and (len(separator) != 1 or separator.isalnum() or separator in '."\n'):
            raise Usage(f"--separator takes one character, tab or space, not {separator!r}")
        if self.decimal not in (None, ".", ","):
            raise Usage(f"--decimal must be . or , not {self.decimal!r}")
        return Dialect(separator, self.decimal, tuple(self.missing or ()), self.query)


class Voice:
    """Prints facts as text; with `as_json`, nothing but one JSON object at the end; with `quiet`, nothing at all."""

    def __init__(self, as_json: bool = False, quiet: bool = False, to_stderr: bool = False) -> None:
        if as_json and quiet:
            raise Usage("--json and --quiet cannot be used together")
        self.silent, self._as_json, self._to_stderr = as_json or quiet, as_json, to_stderr

    def say(self, text: str) -> None:
        if self.silent:
            return
        if self._to_stderr:
            echo(text, err=True)
        else:
            print_line(text)

    def fact(self, name: str, text: str) -> None:
        self.say(f"{name:<8} {text}")

    def end(self, facts: Mapping[str, object]) -> None:
        if self._as_json:
            echo(json.dumps(facts, default=str))


def columns_of(model: tables.Model) -> str:
    """How each column was read; for example, a code that is text shows up as a category."""
    from evcl.tables.encoding import Number

    encoder, names = model.encoder, []
    for name in encoder.names:
        part, texts = encoder.parts(name)[0], len(encoder.texts(name))
        if isinstance(part, Number):
            kind = f" ({' x '.join(map(str, part.shape))} numbers)" if part.shape else ""
        else:
            kind = " (dates)" if part.kind == "time" else f" ({many(texts, 'category', 'categories')})"
        names.append(name + kind)
    return shortened(names)


def shortened(names: list[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def many(count: int, one: str, several: str | None = None) -> str:
    """The number with the noun: 1 class, 2 classes."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def percent(part: float) -> str:
    return f"{100 * part:.1f}%"


def size_of(path: Path) -> str:
    return f"{path.stat().st_size / 1000:,.0f} kB"
