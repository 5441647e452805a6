"""One colour and one marker per method, the same in every figure, in print and on the page."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.resources import files

INK = {"light": "#1b1f24", "dark": "#e6edf3"}
PAGE_COLOURS = {"light": "#ffffff", "dark": "#0f1318"}


@dataclass(frozen=True)
class Style:
    """How a method is drawn: its colour on a light and a dark background; its marker in figures and in text."""

    light: str
    dark: str
    marker: str
    sign: str

    @property
    def size(self) -> float:
        """The relative size of the marker: thin or pointed markers must be larger to look the same size."""
        return {"*": 1.9, "P": 1.5, "X": 1.5, "p": 1.25, "^": 1.2, "v": 1.2, "<": 1.2, ">": 1.2, "d": 1.3}.get(
            self.marker, 1.0
        )


TABLES = tomllib.loads(files("evcl.report").joinpath("styles.toml").read_text("utf-8"))
STYLES = {method: Style(*values) for method, values in TABLES["styles"].items()}
METHOD_NAMES: dict[str, str] = TABLES["names"]
SPARE = tuple(Style(*values) for values in TABLES["spare"]["styles"])


def assign(names: Iterable[tuple[str, str]]) -> dict[str, Style]:
    """A style for each label in (label, method): a method's first label gets its own style, the others a spare one."""
    styles: dict[str, Style] = {}
    owners: set[str] = set()
    spared = 0
    for label, method in names:
        if label in styles:
            continue
        if method in STYLES and method not in owners:
            owners.add(method)
            styles[label] = STYLES[method]
        else:
            turns, place = divmod(spared, len(SPARE))
            mark = SPARE[(place + turns) % len(SPARE)]  # once all colours are used, repeat them with other markers
            styles[label] = replace(SPARE[place], marker=mark.marker, sign=mark.sign)
            spared += 1
    return styles
