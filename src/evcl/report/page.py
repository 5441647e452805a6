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
from importlib.resources import files
from typing import Any

from evcl.benchmarks import BENCHMARKS
from evcl.report import figures, runs, streams, tables
from evcl.report.figures import enlarged, measures
from evcl.report.published import WHY
from evcl.report.results import Group, Line, series


def page(groups: Mapping[str, Group], title: str) -> str:
    """The HTML of a page that shows results grouped by benchmark."""
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    styles = series(groups.values())
    numbers = {label: number for number, label in enumerate(styles)}
    data = {
        "series": [
            {"label": label, "light": s.light, "dark": s.dark, "symbol": s.symbol, "size": s.size}
            for label, s in styles.items()
        ],
        "figures": [figure for group in groups.values() for figure in _drawn(group, numbers)],
    }
    script, plotly = _asset("page.js"), get_plotlyjs()
    # Only these two scripts may run, and nothing may be downloaded: even an unescaped name in a result is harmless.
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}' '{_hash(plotly)}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    # plotly.js is compressed from 5 MB to 2 MB; the browser decompresses it.
    packed = base64.b64encode(gzip.compress(plotly.encode(), mtime=0)).decode()
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.from_string(_asset("page.html.j2")).render(
        title=title,
        groups=list(groups.values()),
        styles=styles,
        numbers=numbers,
        benchmarks=BENCHMARKS,
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


def _asset(name: str) -> str:
    return files("evcl.report").joinpath(name).read_text("utf-8")


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


# --- the data of the figures ---------------------------------------------------------------------------------------


def _drawn(group: Group, numbers: Mapping[str, int]) -> list[dict[str, Any]]:
    """The two figures of a group."""
    return streams.page_figures(group, numbers) if group.is_stream else _figures(group, numbers)


def _figures(group: Group, numbers: Mapping[str, int]) -> list[dict[str, Any]]:
    scale, shown = group.score.scale, measures(group)
    first = {line.result.method: line.label for line in reversed(group.lines)}
    curves = []
    for line in group.lines:
        mean, spread = line.curve
        show = line.published is not None and first[line.result.method] == line.label  # only once per method
        curves.append(
            {
                "series": numbers[line.label],
                "mean": _numbers(scale * mean),
                "sd": _numbers(scale * spread),
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


def _measure(line: Line, measure: str, scale: float) -> dict[str, Any] | None:
    found = line.result.measure(measure)
    if found.mean is None:
        return None
    spread = None if found.std is None else round(scale * found.std, 5)
    return {"mean": round(scale * found.mean, 5), "sd": spread, "seeds": _numbers([scale * v for v in found.measured])}


def _numbers(values: Any) -> list[float | None]:
    return [round(float(v), 5) if math.isfinite(v) else None for v in values]
