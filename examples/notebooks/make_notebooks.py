"""Make the notebooks of this folder from the first three tutorials.

    python examples/notebooks/make_notebooks.py

Text becomes Markdown cells, Python and commands become code cells, and what a tutorial says is printed becomes their
output. The tests check that the notebooks are as this makes them, and run them.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
TUTORIALS = {
    "1-first-stream": DOCS / "start.md",
    "2-own-table": DOCS / "tutorials" / "table.md",
    "3-own-network": DOCS / "tutorials" / "network.md",
}
BLOCK = re.compile(r"^```(python|sh|text)\n(.*?)^```\n", re.M | re.S)


def lines(text: str) -> list[str]:
    return text.strip("\n").splitlines(keepends=True)


def linked(text: str, folder: Path) -> str:
    """Links to other documents, as they are from here."""

    def moved(found: re.Match[str]) -> str:
        path, mark, anchor = found[1].partition("#")
        target = Path(os.path.relpath(folder / path, HERE)).as_posix() if path else ""
        return f"]({target}{mark}{anchor})"

    return re.sub(r"\]\((?!https?:)([^)]+)\)", moved, text)


def notebook(path: Path) -> dict[str, Any]:
    """The notebook of a tutorial."""
    text, at, cells = path.read_text("utf-8"), 0, list[dict[str, Any]]()

    def add_text(until: int) -> None:
        if source := lines(linked(text[at:until], path.parent)):
            cells.append({"cell_type": "markdown", "metadata": {}, "source": source})

    for found in BLOCK.finditer(text):
        add_text(found.start())
        at = found.end()
        language, block = found.groups()
        if language == "text":
            cells[-1]["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines(block)}]
            continue
        if language == "sh":
            block = re.sub(r"^(?=\S)", "!", block, flags=re.M)
        cells.append(
            {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": lines(block)}
        )
    add_text(len(text))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def written(path: Path) -> str:
    return json.dumps(notebook(path), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    for name, path in TUTORIALS.items():
        (HERE / f"{name}.ipynb").write_text(written(path), "utf-8")
