"""A self-contained HTML page with figures, tables and the runs behind them. It follows the reader's light or dark theme
and window width, and works offline.

`page.html.j2` is the template; this file computes what it shows.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import math
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from evcl._core.version import __version__
from evcl.experiments.known import known_benchmark
from evcl.report import diagnostics, figures, runs, streams, tables
from evcl.report.cells import best_note
from evcl.report.figures import MOST_POINTS, enlarged, measures
from evcl.report.published import WHY
from evcl.report.results import Group, Line, scenarios, series

MANY = 8  # matrices that are shown at once; the others are folded away


def page(groups: Mapping[str, Group], title: str, made: str = "") -> str:
    """The HTML of a page that shows results grouped by benchmark. `made`: the date that it shows."""
    styles = series(groups.values())
    numbers = {label: number for number, label in enumerate(styles)}
    data: dict[str, list[Any]] = {
        "series": [
            {"label": label, "light": s.light, "dark": s.dark, "symbol": s.symbol, "size": s.size}
            for label, s in styles.items()
        ],
        "figures": [],
    }
    places: dict[str, dict[str, int]] = {}  # of a group's figures among all, by their kind
    compared = scenarios(groups.values())
    for name, drawn in [
        *((group.slug, _drawn(group, numbers)) for group in groups.values()),
        *((f"scenarios {name}", [_scenarios(some, numbers)]) for name, some in compared.items()),
    ]:
        places[name] = {one["kind"]: len(data["figures"]) + i for i, one in enumerate(drawn)}
        data["figures"] += drawn
    script, (plotly, packed) = _asset("page.js"), _plotly()
    # Only these two scripts may run, and nothing may be downloaded: even an unescaped name in a result is harmless.
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}' '{plotly}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return _template().render(  # type: ignore[no-any-return]
        title=title,
        made=made,
        version=__version__,
        groups=list(groups.values()),
        places=places,
        scenarios=compared,
        diagnostics=diagnostics,
        best=best_note(line for group in groups.values() for line in group.lines).replace("**", ""),
        many=MANY,
        styles=styles,
        numbers=numbers,
        known=known_benchmark,
        figures=figures,
        runs=runs,
        streams=streams,
        tables=tables,
        why=WHY,
        isfinite=math.isfinite,
        has_published=any(group.has_published for group in groups.values()),
        data=data,
        policy=policy,
        packed=packed,
        script=script,
        css=_asset("page.css"),
    )


@cache
def _plotly() -> tuple[str, str]:
    """The hash of plotly.js, and plotly.js compressed from 5 MB to 2 MB; the browser decompresses it."""
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return _hash(script), base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode()


@cache
def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    environment.filters["only_last"] = figures.only_last
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.from_string(_asset("page.html.j2"))


def _asset(name: str) -> str:
    return files("evcl.report").joinpath(name).read_text("utf-8")


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


# --- the data of the figures ---------------------------------------------------------------------------------------


def _drawn(group: Group, numbers: Mapping[str, int]) -> list[dict[str, Any]]:
    """The figures of a group."""
    found = streams.page_figures(group, numbers) if group.is_stream else _figures(group, numbers)
    if diagnostics.has_reliability(group):
        found.append(_reliability(group, numbers))
    if diagnostics.has_memory(group):
        found.append(_memory(group, numbers))
    ranks = {numbers[label]: rank for rank, label in enumerate(_ranked(group))}
    for figure in found:
        for line in figure["lines"]:
            line["rank"] = ranks[line["series"]]
    return found


def _ranked(group: Group) -> list[str]:
    """The labels, the best result first."""

    def place(line: Line) -> float:
        if group.is_stream:
            name = streams.measured(group)[0]
            found, better = streams.block(line).measures.get(name), streams.SHOWN[name].better
        else:
            found, better = line.result.measure(line.result.score), 1
        return math.inf if found is None or found.mean is None else -better * found.mean

    return [line.label for line in sorted(group.lines, key=place)]


def _figures(group: Group, numbers: Mapping[str, int]) -> list[dict[str, Any]]:
    scale, shown = group.score.scale, measures(group)
    first = {line.result.method: line.label for line in reversed([line for line in group.lines if line.published])}
    curves = []
    for line in group.lines:
        mean, spread = line.curve
        show = first.get(line.result.method) == line.label  # only once per method
        points = list(line.curves) if 1 < len(line.curves) <= MOST_POINTS else []
        curves.append(
            {
                "series": numbers[line.label],
                "mean": _numbers(scale * mean),
                "sd": _numbers(scale * spread),
                "seeds": [_numbers(scale * one) for one in points],
                "published": _numbers([100 * v for v in line.published]) if show and line.published else None,
            }
        )
    measured = [
        {"series": numbers[line.label], "values": [_measure(line, name, each) for name, _, each in shown]}
        for line in group.lines
    ]
    zoom = enlarged(group)
    return [
        {
            "kind": "curves",
            "lines": curves,
            "enlarged": None if zoom is None else _numbers(zoom),
            "title": group.score.title,
            "most": group.score.most if math.isfinite(group.score.most) else None,
        },
        {"kind": "measures", "lines": measured, "measures": [title for _, title, _ in shown]},
    ]


def _reliability(group: Group, numbers: Mapping[str, int]) -> dict[str, Any]:
    lines = []
    for line in group.lines:
        found = diagnostics.reliability(line)
        if found is not None:
            parts = {name: _numbers(100 * values) for name, values in found._asdict().items()}
            lines.append({"series": numbers[line.label], **parts})
    return {"kind": "reliability", "lines": lines, "range": _numbers(diagnostics.confidence_range(group))}


def _memory(group: Group, numbers: Mapping[str, int]) -> dict[str, Any]:
    lines = []
    for line in group.lines:
        kept, found = diagnostics.size(line), _measure(line, line.result.score, group.score.scale)
        if kept is not None and found is not None:
            lines.append({"series": numbers[line.label], "kept": round(kept, 6), **found})
    return {"kind": "memory", "lines": lines, "title": group.score.title}


def _scenarios(groups: list[Group], numbers: Mapping[str, int]) -> dict[str, Any]:
    """The score in each scenario, a panel each."""
    labels = dict.fromkeys(line.label for group in groups for line in group.lines)
    lines = []
    for label in labels:
        each = [next((line for line in group.lines if line.label == label), None) for group in groups]
        values = [
            None if x is None else _measure(x, x.result.score, g.score.scale) for x, g in zip(each, groups, strict=True)
        ]
        lines.append({"series": numbers[label], "values": values, "rank": 0})
    names = [f"{group.scenario_name}{f' ({group.score.unit})' if group.score.unit else ''}" for group in groups]
    return {"kind": "measures", "lines": lines, "measures": names, "score": True}


def _measure(line: Line, measure: str, scale: float) -> dict[str, Any] | None:
    found = line.result.measure(measure)
    if found.mean is None:
        return None
    spread = None if found.std is None else round(scale * found.std, 5)
    return {"mean": round(scale * found.mean, 5), "sd": spread, "seeds": _numbers([scale * v for v in found.measured])}


def _numbers(values: Any) -> list[float | None]:
    return [round(float(v), 5) if math.isfinite(v) else None for v in values]
