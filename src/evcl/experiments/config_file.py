"""A configuration file in TOML, of a bounded size; what is wrong in it is said with the line and the key."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, NoReturn

from evcl._core.errors import EvclError
from evcl._core.files import read_text

MOST_BYTES, MOST_PARTS = 1_000_000, 20  # of the file, and of a dotted key
LINE = 1_000  # letters of a line that is looked at for its key
HEADER = re.compile(r"\s*\[\[?\s*([^\]]+?)\s*\]\]?\s*(#.*)?$")
KEY = re.compile(r"\s*((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=")
DOTTED = re.compile(rf"(?<![\w\"'-])(?:[\w\"'-]++\s*+\.\s*+){{{MOST_PARTS}}}")
PART = re.compile(r"[\w-]+|\"[^\"]*\"|'[^']*'")


class ConfigFile:
    def __init__(self, path: Path) -> None:
        self.path, self._text = path, read_text(path, MOST_BYTES)
        if (dotted := DOTTED.search(self._text)) is not None:  # tomllib takes minutes for a key of 10,000 parts
            line = self._text.count("\n", 0, dotted.start()) + 1
            raise EvclError(f"{path}, line {line}: a key of more than {MOST_PARTS} parts")
        try:
            self.values: dict[str, Any] = tomllib.loads(self._text)
        except RecursionError:
            raise EvclError(f"{path} cannot be read as TOML: it is nested too deeply") from None
        except ValueError as error:
            raise EvclError(f"{path} cannot be read as TOML: {error}") from error

    def bad(self, key: tuple[str, ...], what: str) -> NoReturn:
        """Refuse what stands there: `("methods", "evcl", "lr")`, and what is the matter."""
        line = self.line(key)
        raise EvclError(f"{self.path}{f', line {line}' if line else ''}: {'.'.join(key)}: {what}")

    def line(self, key: tuple[str, ...]) -> int | None:
        """Where the key stands or, in a table of one line, what it is in; None where neither does.

        Of several tables of one name, the first that has it. tomllib does not say, so this looks for itself.
        """
        best: tuple[int, int] | None = None  # as much of the key as a line names, and its number
        table: tuple[str, ...] = ()
        for number, text in enumerate(self._text.splitlines(), 1):
            here: tuple[str, ...] | None = None
            if (header := HEADER.match(text[:LINE])) is not None:
                here = table = _parts(header[1])
            elif (found := KEY.match(text[:LINE])) is not None:
                here = (*table, *_parts(found[1]))
            if here and here == key[: len(here)] and (best is None or len(here) > best[0]):
                best = len(here), number
        return None if best is None else best[1]


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in PART.findall(text))
