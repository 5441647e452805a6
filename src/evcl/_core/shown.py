"""Text for a screen: characters that would control it are shown instead of sent."""

from __future__ import annotations

import re

# C0 and C1 controls, marks and overrides of the direction of text, separators of lines, and halves of surrogate pairs.
CONTROL_CHARACTERS = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_CONTROL, _LINE = re.compile(f"[{CONTROL_CHARACTERS}]"), re.compile(f"[{CONTROL_CHARACTERS}\n\t]")


def shown(text: object, line: bool = False) -> str:
    r"""The text with each control character as \x1b or \u202e. With `line`, also new lines and tabs: names of files and
    tasks, which come from anywhere, then cannot add lines of their own.
    """
    return (_LINE if line else _CONTROL).sub(_escaped, str(text))


def plain(text: str) -> bool:
    """Whether a text has no characters that `shown` would show as something else."""
    return _LINE.search(text) is None


def _escaped(found: re.Match[str]) -> str:
    number = ord(found[0])
    known = {9: r"\t", 10: r"\n", 13: r"\r"}
    return known.get(number) or (f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}")
