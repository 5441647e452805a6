"""The programs that docs/comparison.md counts the lines of."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

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
    copied = re.sub(r"<!-- (\w+) -->.*?<!-- end \1 -->", "", PAGE, flags=re.S)
    rows = [line for line in copied.splitlines() if line.startswith("|") and "\N{PLUS-MINUS SIGN}" in line]
    assert len(rows) == 13
    assert [row for row in rows if row not in others] == []


def test_its_other_tables_are_made_from_the_result_file(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "perf"))
    measures = runpy.run_path(str(ROOT / "perf" / "peers_others.py"))
    saved = json.loads(measures["RESULTS"].read_text("utf-8"))
    assert PAGE.count("<!-- end ") == len(measures["MEASURES"]) == len(saved)
    assert measures["filled"](PAGE, saved) == PAGE, "run python perf/peers_others.py table"
    for name, part in saved.items():
        for row in part["rows"]:
            counts = {len(value) for value in row.values() if isinstance(value, list)}
            assert counts == {3}, f"{name} has another number of seeds"


def test_its_sentences_about_times_are_those_of_the_result_file():
    saved = json.loads((ROOT / "perf" / "results" / "peers_others.json").read_text("utf-8"))
    ewc, kfac, _, diagonal, kronecker = (fmean(row["ms"]) for row in saved["laplace"]["rows"])
    assert f"takes {diagonal / ewc:.1f} and {kronecker / kfac:.1f} times as long" in PAGE
    peft, naive, evcl = (fmean(row["ms"]) for row in saved["peft"]["rows"])
    assert naive / peft == pytest.approx(1, abs=0.02)
    assert f"`evcl` {evcl / peft:.1f} times as much" in PAGE
    first, *others = saved["continuum"]["rows"][1]["stream"]
    assert f"the first was {first:.2f} s and the others {fmean(others):.2f}" in PAGE


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
