"""One self-contained HTML page: figures, tables and how each was made; light and dark, narrow and wide, no network."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from evcl.benchmarks import BENCHMARKS
from evcl.report.figures import MEASURES, enlarged, matrix, matrix_range
from evcl.report.published import WHY
from evcl.report.results import Group, Line, series
from evcl.report.runs import command, machine, seeds, settings, software
from evcl.report.styles import Style
from evcl.report.tables import (
    BRACKETS,
    DEFINITIONS,
    PAIRED,
    Table,
    caption,
    full_table,
    main_table,
    paired_table,
    reference,
)


def page(groups: Mapping[str, Group], title: str) -> str:
    """The page for results grouped by benchmark."""
    from plotly.offline import get_plotlyjs

    styles = series(groups.values())
    numbers = {label: number for number, label in enumerate(styles)}
    figures = [figure for group in groups.values() for figure in _figures(group, numbers)]
    data = {
        "series": [
            {"label": label, "light": s.light, "dark": s.dark, "symbol": s.symbol, "size": s.size}
            for label, s in styles.items()
        ],
        "figures": figures,
    }
    has_published = any(group.has_published for group in groups.values())
    sections = "\n".join(_section(group, numbers, 2 * place) for place, group in enumerate(groups.values()))
    overview = ""
    if len(groups) > 1:
        table = _table(main_table(groups.values()), "Average accuracy after the last task", numbers)
        note = f'<p class="soft">{escape(BRACKETS)}</p>' if has_published else ""
        overview = f'<section id="overview"><h2>Average accuracy after the last task</h2>{table}{note}</section>'
    script, plotly = _asset("page.js"), get_plotlyjs()
    # Scripts are named by their hashes, and nothing can be fetched: a name in a result cannot do harm, even unescaped.
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}' '{_hash(plotly)}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    # plotly.js comes packed, 2 MB instead of 5, and is unpacked by the browser.
    packed = base64.b64encode(gzip.compress(plotly.encode(), mtime=0)).decode()
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{_asset("page.css")}</style></head><body>
<a class="skip" href="#results">Skip to the results</a>
<div class="frame"><header><h1>{escape(title)}</h1>
<p>{escape(_lead(groups, styles))}</p>
<details class="soft"><summary>What the numbers are</summary><p>{escape(DEFINITIONS)}</p></details></header>
<noscript><p class="note">JavaScript, which draws the figures, is off. The tables hold their numbers.</p></noscript>
<div class="layout">
{_switches(groups, styles, has_published)}
<main id="results">
{overview}
{sections}
{_why() if has_published else ""}
</main></div></div>
<script type="application/json" id="data">{_json(data)}</script>
<script type="text/plain" id="plotly">{packed}</script>
<script>{script}</script>
</body></html>
"""


def _lead(groups: Mapping[str, Group], styles: Mapping[str, Style]) -> str:
    def count(number: int, word: str) -> str:
        return f"{number} {word}{'s' * (number != 1)}"

    return (
        f"{count(len(styles), 'method')} on {count(len(groups), 'benchmark')}: how accurate, after each task, on all "
        "tasks so far; what is forgotten; and how well the probabilities are calibrated."
    )


def _asset(name: str) -> str:
    return files("evcl.report").joinpath(name).read_text("utf-8")


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _json(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


# --- the data of the figures ---------------------------------------------------------------------------------------


def _figures(group: Group, numbers: Mapping[str, int]) -> list[dict[str, Any]]:
    first = {line.result.method: line.label for line in reversed(group.lines)}
    curves = []
    for line in group.lines:
        mean, spread = line.curve
        show = line.published is not None and first[line.result.method] == line.label  # once a method
        curves.append(
            {
                "series": numbers[line.label],
                "mean": _numbers(100 * mean),
                "sd": _numbers(100 * spread),
                "published": _numbers([100 * v for v in line.published]) if show and line.published else None,
            }
        )
    measures = [
        {"series": numbers[line.label], "values": [_measure(line, name, scale) for name, _, scale in MEASURES]}
        for line in group.lines
    ]
    zoom = enlarged(group)
    return [
        {"kind": "curves", "lines": curves, "enlarged": None if zoom is None else _numbers(zoom)},
        {"kind": "measures", "lines": measures, "measures": [name for _, name, _ in MEASURES]},
    ]


def _measure(line: Line, measure: str, scale: float) -> dict[str, Any] | None:
    found = line.result.measure(measure)
    if found.mean is None:
        return None
    spread = None if found.std is None else round(scale * found.std, 5)
    return {"mean": round(scale * found.mean, 5), "sd": spread, "seeds": _numbers([scale * v for v in found.measured])}


def _numbers(values: Any) -> list[float | None]:
    return [round(float(v), 5) if math.isfinite(v) else None for v in values]


# --- the parts of the page -----------------------------------------------------------------------------------------


def _switches(groups: Mapping[str, Group], styles: Mapping[str, Style], has_published: bool) -> str:
    boxes = "\n".join(
        f'<label><input type="checkbox" checked data-switch="{number}">{_sign(style)} {escape(label)}</label>'
        for number, (label, style) in enumerate(styles.items())
    )
    published = (
        '<label><input type="checkbox" checked data-switch="published">'
        '<span class="dash" aria-hidden="true">- -</span> published curves</label>'
        if has_published
        else ""
    )
    links = "".join(f'<li><a href="#benchmark-{group.slug}">{escape(group.name)}</a></li>' for group in groups.values())
    return f"""<details class="switches" open><summary>Methods and benchmarks</summary>
<fieldset><legend>Methods shown, in every figure and table</legend>
{boxes}
{published}
<p><button type="button" data-all="on">all</button> <button type="button" data-all="off">none</button></p>
<output id="shown" class="soft" aria-live="polite"></output></fieldset>
<nav aria-labelledby="benchmarks"><h2 id="benchmarks">Benchmarks</h2><ul>{links}</ul></nav>
</details>"""


def _sign(style: Style) -> str:
    return (
        f'<span class="sign" style="--light:{style.light};--dark:{style.dark}" aria-hidden="true">{style.sign}</span>'
    )


def _section(group: Group, numbers: Mapping[str, int], figure: int) -> str:
    name = escape(group.name)
    benchmark = group.lines[0].result.benchmark
    summary = f"{BENCHMARKS[benchmark].summary}. " if benchmark in BENCHMARKS else ""
    key = "".join(
        f'<li data-series="{numbers[line.label]}">{_sign(line.style)}{escape(line.label)}</li>' for line in group.lines
    )
    dashed = " Dashed: the published curves." if group.has_published else ""
    low, high = matrix_range(group)
    matrices = "\n".join(_matrix(line, numbers[line.label], low, high) for line in group.lines)
    runs = "\n".join(_run(line, numbers[line.label]) for line in group.lines)
    return f"""<section id="benchmark-{group.slug}"><h2>{name}</h2>
<p class="soft">{escape(summary + caption(group))}.</p>
<figure><div class="plot" data-figure="{figure}" role="img" aria-label="Average accuracy against tasks seen on {name}, a
line a method; the tables below hold the numbers"></div><ul class="key">{key}</ul>
<figcaption>Average accuracy over the tasks seen so far, after each task. Bands: one standard deviation.{dashed}
</figcaption></figure>
{_table(full_table(group), f"Results on {group.name}", numbers)}
{_paired(group, numbers)}
<h3>Forgetting, likelihood and calibration</h3>
<figure><div class="plot" data-figure="{figure + 1}" role="img" aria-label="Forgetting, NLL and ECE on {name}, a row a
method; the table above holds the numbers"></div>
<figcaption>After the last task: the mean, one standard deviation, and a stroke for each seed.</figcaption></figure>
<h3>Accuracy on each task after each task</h3>
<p class="soft">Per cent, means over the seeds; the last column is the average over the tasks seen. Colours run from
{low:.1f} (lightest) to {high:.1f}.</p>
<div class="matrices" style="--cell:{max(2.8 * group.tasks + 5, 13):g}rem">{matrices}</div>
<h3>How each result was made</h3><div class="runs">{runs}</div></section>"""


def _table(table: Table, name: str, numbers: Mapping[str, int], kind: str = "wide") -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    body = "\n".join(
        f'<tr data-series="{" ".join(str(numbers[label]) for label in labels)}"><th scope="row">{escape(cells[0])}</th>'
        + "".join(f"<td>{escape(cell).replace(' ± ', '&nbsp;±&nbsp;')}</td>" for cell in cells[1:])
        + "</tr>"
        for labels, cells in table.rows
    )
    return f"""<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}"><table class="{kind}">
<thead><tr>{head}</tr></thead><tbody>
{body}
</tbody></table></div>"""


def _paired(group: Group, numbers: Mapping[str, int]) -> str:
    table, first = paired_table(group), reference(group)
    if table is None or first is None:
        return ""
    name = f"{first.label} against the others"
    return f"""<div data-series="{numbers[first.label]}"><h3>{escape(name)}</h3>
<p class="soft">{escape(PAIRED.format(label=first.label))}</p>
{_table(table, f"{name} on {group.name}", numbers, "wide narrow")}</div>"""


def _matrix(line: Line, number: int, low: float, high: float) -> str:
    values, (means, _) = matrix(line), line.curve
    head = "".join(f'<th scope="col"><span class="unseen">on task </span>{k + 1}</th>' for k in range(len(values)))
    body = []
    for t, row in enumerate(values):
        cells = "".join(
            f'<td style="--v:{(v - low) / (high - low):.3f}">{v:.1f}</td>'
            if math.isfinite(v)
            else '<td class="none"></td>'
            for v in row
        )
        mean = f"{100 * means[t]:.1f}" if math.isfinite(means[t]) else ""
        row_head = f'<th scope="row"><span class="unseen">after task </span>{t + 1}</th>'
        body.append(f'<tr>{row_head}{cells}<td class="mean">{mean}</td></tr>')
    # what may be wider than its place must be reachable by keyboard
    scrolls = f' tabindex="0" role="region" aria-label="Accuracy of {escape(line.label)}"' if len(values) > 6 else ""
    return f"""<figure data-series="{number}"{scrolls}><table>
<caption>{_sign(line.style)} {escape(line.label)}</caption>
<thead><tr><td class="none"></td>{head}<th scope="col">mean</th></tr></thead><tbody>
{"".join(body)}</tbody></table></figure>"""


def _run(line: Line, number: int) -> str:
    result = line.result
    pairs = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in settings(result).items()
    )
    numbers = f"seed{'s' * (len(result.seeds) > 1)} {seeds(result)}"
    said = f"{numbers}; preset {result.preset}; {result.seconds:.1f} s on {machine(result)}"
    return f"""<details data-series="{number}"><summary>{escape(line.label)}
<span class="soft">{escape(said)}</span></summary><p class="soft">{escape(software(result))}</p>
<pre tabindex="0" aria-label="Command">{escape(command(result))}</pre><dl>{pairs}</dl></details>"""


def _why() -> str:
    paragraphs = "".join(f"<p>{_code(text)}</p>" for text in WHY)
    return f'<section id="published"><h2>About the published curves</h2><div class="note">{paragraphs}</div></section>'


def _code(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
