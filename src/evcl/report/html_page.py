"""A self-contained HTML page with figures, tables and the runs behind them. It follows the reader's light or dark theme
and window width, and works offline.

`page.html.j2` is the template; this file computes what it shows.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from evcl._core.version import __version__
from evcl.experiments.known import known_benchmark
from evcl.report import diagnostics, figures, runs, streams, tables
from evcl.report.cells import best_note
from evcl.report.published import WORDS
from evcl.report.results import Group, Line, scenarios, series
from evcl.report.styles import INK, PAGE_COLOURS, Style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SVG = "http://www.w3.org/2000/svg"
ElementTree.register_namespace("", SVG)
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")

OPEN_MATRICES = 8  # matrices that are shown at once; the others are folded away


def page(groups: Mapping[str, Group], title: str, made: str = "") -> str:
    """The HTML of a page that shows results grouped by benchmark. `made`: the date that it shows."""
    styles = series(groups.values())
    numbers = {label: number for number, label in enumerate(styles)}
    compared = scenarios(groups.values())
    drawn = {group.slug: drawn_figures(group, numbers) for group in groups.values()}
    drawn |= {f"scenarios {name}": {"measures": inline(figures.scenario_figure(some), numbers, f"{name} scenarios")}
              for name, some in compared.items()}  # fmt: skip
    script = _asset("page.js")
    # Only this script may run, and nothing may be downloaded: even an unescaped name in a result is harmless.
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return _template().render(  # type: ignore[no-any-return]
        title=title,
        made=made,
        version=__version__,
        groups=list(groups.values()),
        drawn=drawn,
        ranked={group.slug: [numbers[label] for label in _ranked(group)] for group in groups.values()},
        scenarios=compared,
        best=best_note(line for group in groups.values() for line in group.lines).replace("**", ""),
        many=OPEN_MATRICES,
        styles=styles,
        numbers=numbers,
        known=known_benchmark,
        figures=figures,
        runs=runs,
        streams=streams,
        tables=tables,
        words=WORDS,
        isfinite=math.isfinite,
        has_published=any(group.has_published for group in groups.values()),
        policy=policy,
        script=script,
        css=_asset("page.css") + _colours(styles.values()),
    )


def drawn_figures(group: Group, numbers: Mapping[str, int]) -> dict[str, str]:
    """The figures of a group as SVG, by their kind."""
    known = streams.STREAM_FIGURES if group.is_stream else figures.FIGURES
    made = {suffix[1:] or "curves": draw(group, True) for suffix, draw in {**known, **diagnostics.DIAGNOSTICS}.items()
            if suffix != "-matrices"}  # fmt: skip
    return {
        kind: inline(figure, numbers, f"{group.slug} {kind}") for kind, figure in made.items() if figure is not None
    }


def inline(figure: Figure, numbers: Mapping[str, int], name: str) -> str:
    """A figure as SVG within the page: what shows a method has its number, and says what it shows when pointed at; the
    colours are variables, which the theme gives a value.
    """
    written = io.StringIO()
    with figures.style(page=True):
        import matplotlib

        matplotlib.rcParams["svg.hashsalt"] = name  # ids are unique within the page
        figure.savefig(written, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(written.getvalue())
    width = float(root.attrib["viewBox"].split()[2]) / 72
    root.attrib = {"viewBox": root.attrib["viewBox"], "style": f"max-width:{width:.3g}in;min-width:{0.7 * width:.3g}in"}
    for gone in (f"{{{SVG}}}metadata", f"{{{SVG}}}defs"):  # the latter sets the joints of all lines of the page
        for one in root.findall(gone):
            if one.find(f"{{{SVG}}}style") is not None or gone.endswith("metadata"):
                root.remove(one)
    for element in list(root.iter(f"{{{SVG}}}g")):
        marked = element.attrib.pop("id", "")
        if marked.startswith("["):
            _say(element, numbers, *json.loads(marked))
    text = ElementTree.tostring(root, "unicode").replace(f'xmlns="{SVG}" ', "")
    return re.sub(r"(?<=: )#[0-9a-f]{6}\b", lambda found: f"var(--x{found[0][1:]})", text)


def _say(element: ElementTree.Element, numbers: Mapping[str, int], label: str, extra: bool, texts: list[str]) -> None:
    """Number the artist of a method, and give it, or each of its points, the text that is shown when pointed at."""
    element.attrib |= {"data-series": str(numbers[label]), "class": "extra" if extra else "line"}
    if texts and texts[0].startswith(f"{label}, published\n"):
        element.attrib["class"] = "extra published"
    hidden = {id(part) for defs in element.iter(f"{{{SVG}}}defs") for part in defs.iter()}
    points = [part for part in element.iter(f"{{{SVG}}}use") if id(part) not in hidden]
    points = points or [part for part in element.iter(f"{{{SVG}}}path") if id(part) not in hidden]
    for part, text in zip(points, texts, strict=False) if len(points) == len(texts) else ():
        ElementTree.SubElement(part, f"{{{SVG}}}title").text = text
    title = ElementTree.Element(f"{{{SVG}}}title")
    title.text = label
    element.insert(0, title)


def _colours(styles: Iterable[Style]) -> str:
    """The colours of figures in a light and a dark theme."""
    themes: dict[str, str] = {}
    for theme, background in PAGE_COLOURS.items():
        named = {
            INK["light"]: INK[theme],
            "#ffffff": background,
            figures.GREY: "var(--soft)",
            figures.GRID_COLOUR: "var(--line)",
        }
        named |= {style.light.lower(): getattr(style, theme) for style in styles}
        themes[theme] = ":root{" + "".join(f"--x{one[1:]}:{value};" for one, value in named.items()) + "}"
    return f"{themes['light']}@media (prefers-color-scheme: dark){{{themes['dark']}}}"


@cache
def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    environment.filters["only_last"] = figures.only_last
    return environment.from_string(_asset("page.html.j2"))


def _asset(name: str) -> str:
    return files("evcl.report").joinpath(name).read_text("utf-8")


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _ranked(group: Group) -> list[str]:
    """The labels, the best result first."""

    def place(line: Line) -> float:
        if group.is_stream:
            name = streams.measured(group)[0]
            summary, better = streams.block(line).measures.get(name), streams.MEASURES[name].better
        else:
            summary, better = line.result.measure(line.result.score), 1
        return math.inf if summary is None or summary.mean is None else -better * summary.mean

    return [line.label for line in sorted(group.lines, key=place)]
