"""The programs that docs/comparison.md counts the lines of."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "comparison"
PAGE = (ROOT / "docs" / "comparison.md").read_text("utf-8")
NEEDS = {"with_evcl": "evcl", "with_avalanche": "avalanche", "with_continuum": "continuum", "with_laplace": "laplace"}
RUN = """
import runpy, sys, warnings
from types import ModuleType
sys.modules["torchvision._meta_registrations"] = ModuleType("left out: see tests/integrations/others.py")
warnings.simplefilter("ignore")
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def length(path):
    """Lines of code: without blank ones, comments and the docstring."""
    text = path.read_text("utf-8")
    docstring = ast.parse(text).body[0]
    return sum(
        bool(line.strip()) and not line.strip().startswith("#")
        for number, line in enumerate(text.splitlines(), 1)
        if number > docstring.end_lineno
    )


def test_the_page_has_their_lengths():
    claimed = {name: int(count) for name, count in re.findall(r"^\| `(\w+)\.py` \| (\d+) \|", PAGE, re.M)}
    assert claimed == {path.stem: length(path) for path in FOLDER.glob("with_*.py")}


def test_its_figures_are_those_of_the_other_pages():
    others = "".join((ROOT / "docs" / name).read_text("utf-8") for name in ("RESULTS.md", "PERFORMANCE.md"))
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and "\N{PLUS-MINUS SIGN}" in line]
    assert len(rows) == 13
    assert [row for row in rows if row not in others] == []


@pytest.mark.full
@pytest.mark.parametrize("name", NEEDS)
def test_a_program_learns_three_tasks(name):
    if find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}: make test-integrations installs it")
    command = [sys.executable, "-c", RUN, str(FOLDER / f"{name}.py")]
    ran = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    accuracies = ast.literal_eval(ran.stdout.splitlines()[-1])
    assert len(accuracies) == 3
    assert max(accuracies) > 80
