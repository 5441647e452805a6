"""The states of a folder's cells, read without importing torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evcl._core.errors import EvclError
from evcl.experiments.result import HIDDEN
from evcl.experiments.store import CellState, Store


@dataclass(frozen=True)
class Standing:
    """A cell and its state; its average score if it is done, or the error message if it failed."""

    cell: Mapping[str, Any]
    state: CellState
    score: float | None = None
    message: str = ""
    judged_by: str = "average_accuracy"  # what `score` is, one of SCORES


def standing(folder: Path) -> list[Standing]:
    """The state of every cell of a folder."""
    store = store_in(folder)
    found = []
    for key, cell in store.declared().items():
        state = store.look(key)
        score, message, judged_by = None, "", "average_accuracy"
        if state.kind == "done":
            judged_by, score = store.score(key)
        elif state.kind == "failed":
            message = store.failure(key, state.claims).message
        found.append(Standing(cell, state, score, message, judged_by))
    return found


def store_in(folder: Path) -> Store:
    """The store in a folder: that of a sweep, or the hidden one of `reproduce` and `tune`."""
    for place in (folder, folder / HIDDEN):
        if (place / "sweeps").is_dir():
            return Store(place)
    raise EvclError(f"{folder} holds no sweep: make one with evcl sweep FILE.toml --out {folder}")


def varied(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that differ between the cells that have them."""
    values: dict[str, set[Any]] = {}
    for cell in cells:
        for name, value in cell["settings"].items():
            values.setdefault(name, set()).add(value)
    return [name for name, each in values.items() if len(each) > 1]
