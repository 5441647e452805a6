"""What the commands for models print: facts, one per line, or one JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evcl.cli.options import Usage
from evcl.cli.progress import console, echo

if TYPE_CHECKING:
    from evcl import tables

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing, except errors.")]


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
            console().print(text, soft_wrap=True)

    def fact(self, name: str, text: str) -> None:
        self.say(f"{name:<8} {text}")

    def end(self, facts: Mapping[str, object]) -> None:
        if self._as_json:
            echo(json.dumps(facts, default=str))


def columns_of(model: tables.Model) -> str:
    """How each column was read; for example, a code that is text shows up as a category."""
    encoder = model.encoder
    return shortened([name + _kind(encoder.parts(name)[0], len(encoder.texts(name))) for name in encoder.names])


def _kind(part: Any, texts: int) -> str:
    if part.kind == "number":
        return f" ({' x '.join(map(str, part.shape))} numbers)" if part.shape else ""
    return " (dates)" if part.kind == "time" else f" ({many(texts, 'category', 'categories')})"


def shortened(names: list[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def many(count: int, one: str, several: str | None = None) -> str:
    """The number with the noun: 1 class, 2 classes."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def percent(part: float) -> str:
    return f"{100 * part:.1f}%"


def size_of(path: Path) -> str:
    return f"{path.stat().st_size / 1000:,.0f} kB"
