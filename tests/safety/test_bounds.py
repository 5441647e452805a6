"""The table of limits in docs/SCALE.md is made from `evcl/_core/bounds.py`; running this file writes it again."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from evcl._core import bounds

PAGE = Path(__file__).parents[2] / "docs" / "SCALE.md"
PLACE = re.compile(
    r"(?<=<!-- limits: made from evcl/_core/bounds.py -->\n\n).*?(?=\n\n<!-- end of limits -->)", re.DOTALL
)


def test_the_table_in_the_documents():
    assert PLACE.findall(PAGE.read_text("utf-8")) == [bounds.table()]


def test_every_limit_is_used():
    """By its name, in some module beside the one that states it."""
    sources = Path(bounds.__file__).parents[1].rglob("*.py")
    words = Counter(word for path in sources for word in re.findall(r"\b[A-Z_]+\b", path.read_text("utf-8")))
    limits = [name for name, value in vars(bounds).items() if name.isupper() and isinstance(value, int)]
    assert [name for name in limits if words[name] < 2] == []
    assert len(bounds.BOUNDS) == len(limits)


if __name__ == "__main__":
    PAGE.write_text(PLACE.sub(lambda _: bounds.table(), PAGE.read_text("utf-8")), "utf-8")
