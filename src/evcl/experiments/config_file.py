"""Read configuration files in TOML, and check them against a msgspec struct. Errors name the file and the key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from evcl._core.bounds import MOST_CONFIG_BYTES, MOST_PARTS
from evcl._core.errors import EvclError, brief, unknown
from evcl._core.files import read_text

# A part of a key is a bare word or a quoted text. Texts over several lines are values, and comments are neither.
TOKENS = re.compile(
    r'''(?P<space>[ \t]++)|(?P<dot>\.)|(?P<comment>\#[^\n]*+)
    |(?P<part>"""(?:[^"\\]|\\.|"{1,2}(?!"))*+"{3,5}|\'{3}(?:[^\']|\'{1,2}(?!\'))*+\'{3,5}
    |"(?:[^"\\\n]|\\.)*+"|\'[^\'\n]*+\'|[^\s.=\[\]{},\#"\']++)|(?P<other>.)''',
    re.VERBOSE | re.DOTALL,
)
TYPE_WORDS = {"int": "a whole number", "float": "a number", "str": "a string", "array": "a list", "object": "a table"}
Space = dict[str, Any]  # maps a setting to its value, or to the values that it may take
Spaces = Annotated[Space, Meta(min_length=1, max_length=100)]  # maps the name of a table to a method's Space
NameList = Annotated[tuple[str, ...], Meta(min_length=1, max_length=100)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
S = TypeVar("S", bound=Struct)


def read_config(path: Path, kind: type[S]) -> S:
    """Read a file as the struct `kind`."""
    text = read_text(path, MOST_CONFIG_BYTES)
    if most_parts(text) > MOST_PARTS:  # tomllib takes minutes for a key of 10,000 parts
        raise EvclError(f"{path}: a key has more than {MOST_PARTS} parts")
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise EvclError(f"{path} cannot be read as TOML: it is nested too deeply") from None
    except ValueError as error:
        raise EvclError(f"{path} cannot be read as TOML: {error}") from error
    for name in values:
        if name not in kind.__struct_fields__:
            raise unknown("key", name, kind.__struct_fields__).within(str(path))
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in values:
            raise EvclError(f"{path}: the key {field.name!r} is missing")
    config: S = checked(values, kind, str(path))
    return config


def most_parts(text: str) -> int:
    """The number of parts of the longest dotted key in a text of TOML. Numbers with a point count as keys of two."""
    most = parts = 0
    dotted = False
    for token in TOKENS.finditer(text):
        if token.lastgroup == "part":
            parts, dotted = parts + 1 if dotted else 1, False
            most = max(most, parts)
        elif token.lastgroup == "dot":
            dotted = parts > 0
        elif token.lastgroup != "space":
            parts, dotted = 0, False
    return most


def checked(value: Any, kind: Any, where: str) -> Any:
    """Convert `value` to the type `kind`. If that fails, raise an error that begins with `where`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text, _, key = str(error).partition(" - at `$")
        wanted = text.partition(", got ")[0].removeprefix("Expected ")
        wanted = re.sub("`([^`]*)`", lambda m: " or ".join(TYPE_WORDS.get(k, k) for k in m[1].split(" | ")), wanted)
        if top := re.match(r"\.(\w+)", key):
            value, where = value[top[1]], f"{where}: {key[1:-1]}"
        raise EvclError(f"{where}: must be {wanted}, not {brief(value)}") from None


@contextmanager
def at_key(path: Path, *tables: tuple[str, Collection[str]]) -> Iterator[None]:
    """Put the file and a key before the message of any EvclError raised in this block.

    `tables` are pairs: a table's name in the file ("" for the top level) and its keys. If one of them contains the
    setting that the error names, the key is that setting in the first such table; if not, the first table's name.
    """
    try:
        yield
    except EvclError as error:
        matches = [f"{table}.{error.setting}".lstrip(".") for table, keys in tables if error.setting in keys]
        raise error.within(f"{path}: {(*matches, tables[0][0])[0]}") from error
