"""The guide docs/data.md from top to bottom, as a reader follows it: its Python and its commands, in one folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

GUIDE = Path(__file__).parent.parent.parent / "docs" / "data.md"


def test_the_guide_from_top_to_bottom(evcl):
    blocks = re.findall(r"^```(python|sh)\n(.*?)^```", GUIDE.read_text("utf-8"), re.M | re.S)
    commands = 0
    for language, block in blocks:
        if language == "python":
            exec(compile(block, "guide", "exec"), {"__name__": "guide"})
            continue
        for line in block.splitlines():
            program, *arguments = shlex.split(line)
            assert program == "evcl"
            status, out, err = evcl(*arguments)
            assert (status, err) == (0, ""), line
            commands += 1
    assert commands == 4
    assert "columns  age, income, city (3 categories)" in out
    assert (
        Path("predictions.csv").read_text().startswith("prediction,probability_no,probability_yes,entropy,epistemic\n")
    )
