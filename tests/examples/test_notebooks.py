"""The notebooks are those of the tutorials, and run from top to bottom."""

from __future__ import annotations

import io
import json
import runpy
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def make():
    return runpy.run_path(str(FOLDER / "make_notebooks.py"))


def test_they_are_made_from_the_tutorials(make):
    assert [path.stem for path in NOTEBOOKS] == list(make["TUTORIALS"])
    for name, tutorial in make["TUTORIALS"].items():
        there = (FOLDER / f"{name}.ipynb").read_text("utf-8")
        assert there == make["written"](tutorial), "run python examples/notebooks/make_notebooks.py"


def test_a_notebook_has_what_the_format_asks_for():
    for path in NOTEBOOKS:
        book = json.loads(path.read_text("utf-8"))
        assert (book["nbformat"], book["metadata"]["kernelspec"]["language"]) == (4, "python")
        assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
        for cell in book["cells"]:
            code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
            assert cell.keys() == {"cell_type", "id", "metadata", "source"} | code
            for link in [part.partition(")")[0] for part in "".join(cell["source"]).split("](../")[1:]]:
                assert (FOLDER.parent / link.partition("#")[0]).exists(), f"{path.name}: {link}"


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_as_it_is(path, evcl, tmp_path, monkeypatch):
    """Without Jupyter: a cell shares its names with those before it, and a line with ! is a command."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(path.read_text("utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            continue
        with torch.random.fork_rng(), redirect_stdout(io.StringIO()) as printed:
            if source.startswith("!"):
                for line in source.splitlines():
                    program, *arguments = shlex.split(line[1:], comments=True)
                    assert program == "evcl"
                    status, out, err = evcl(*arguments)
                    assert status == 0, err
                    printed.write(out)
            else:
                exec(compile(source, f"{path.name}, cell {number}", "exec", dont_inherit=True), names)
        claimed = "".join(part for output in cell["outputs"] for part in output["text"])
        words = printed.getvalue().split()
        assert [word for word in claimed.split() if not word[0].isdigit()] == [
            word for word in words[: len(claimed.split())] if not word[0].isdigit()
        ]
