"""The table of limits in docs/SCALE.md is made from `evcl/_core/bounds.py`; running this file writes it again."""

from __future__ import annotations

import re
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
    sources = [path.read_text("utf-8") for path in (Path(bounds.__file__).parents[1]).rglob("*.py")]
    for name, value in vars(bounds).items():
        if name.isupper() and isinstance(value, int):
            used = sum(len(re.findall(rf"\b{name}\b", text)) for text in sources)
            assert used > 1, name
    assert len(bounds.BOUNDS) == sum(name.isupper() and isinstance(v, int) for name, v in vars(bounds).items())


if __name__ == "__main__":
    PAGE.write_text(PLACE.sub(lambda _: bounds.table(), PAGE.read_text("utf-8")), "utf-8")
