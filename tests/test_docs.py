"""Every Python example in the documents runs, and the README's table of settings says what the code says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from evcl.methods import METHODS
from evcl.settings import BAYESIAN, CORESET, ELASTIC, TRAINING, VALIDATION

ROOT = Path(__file__).parent.parent
BLOCKS = [
    pytest.param(block, id=f"{path.name} {number}")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text("utf-8"), re.M | re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_an_example_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = set(METHODS)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(compile(block, "example", "exec"), {"__name__": "example"})
    for name in set(METHODS) - known:
        METHODS.remove(name)


def test_the_readmes_defaults_are_the_codes():
    table = (ROOT / "README.md").read_text("utf-8").partition("| setting | default |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", table, re.M)
    found = {}
    for names, defaults in rows:
        found |= dict(zip(re.findall(r"`(\w+)`", names), defaults.replace("`", "").split(", "), strict=True))
    settings = {**TRAINING, **BAYESIAN, **ELASTIC, **CORESET, "validation": VALIDATION}
    assert found.keys() == settings.keys()
    for name, setting in settings.items():
        assert type(setting.default)(found[name]) == setting.default, name


def test_the_tables_are_made_from_the_result_files():
    make = runpy.run_path(str(ROOT / "docs" / "make_tables.py"))
    for path in make["DOCUMENTS"]:
        text = path.read_text("utf-8")
        assert "<!-- table: " in text
        assert make["filled"](text) == text, f"run python docs/make_tables.py: {path.name}"
