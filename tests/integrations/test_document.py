"""docs/integrations.md from top to bottom, with the libraries that it is about."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from others import needed

TEXT = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text("utf-8")
BLOCKS = re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", TEXT, re.M | re.S)
PACKAGES = {"Avalanche": "avalanche", "Continuum": "continuum", "Hugging Face": "transformers",
            "Lightning": "lightning", "laplace-torch": "laplace", "River": "river"}  # fmt: skip


def test_every_section_has_an_example():
    assert len(BLOCKS) == len(re.findall(r"^## ", TEXT, re.M)) == 2 + len(PACKAGES)


@pytest.mark.parametrize(("title", "code", "printed"), BLOCKS, ids=[title for title, *_ in BLOCKS])
def test_an_example_prints_what_it_says(title, code, printed, tmp_path, monkeypatch):
    if title in PACKAGES:
        needed(PACKAGES[title])
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(), redirect_stdout(io.StringIO()) as found:
        exec(compile(code, title, "exec", dont_inherit=True), {"__name__": "example"})
    if printed:
        pairs = zip(re.findall(r"[\w.]+", found.getvalue()), re.findall(r"[\w.]+", printed), strict=True)
        for ours, theirs in pairs:
            same = abs(float(ours) - float(theirs)) <= 2 if theirs.isdigit() else ours == theirs
            assert same, f"{title} printed {found.getvalue()}"
