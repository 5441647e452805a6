"""One self-contained HTML page: figures and tables, in light and dark, no network."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from html import escape

from evcl.report.figures import THEMES, accuracy_figure
from evcl.report.results import COLUMNS, Result, caption, rows

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --back: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #30363d; --back: #0d1117; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 52rem; background: var(--back); color: var(--ink);
       font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
p, figcaption { color: var(--soft); } figure { margin: 1rem 0; } svg { width: 100%; height: auto; }
figcaption { font-size: .85rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { padding: .4rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap;
         font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; font-size: .85rem; }
.dark { display: none; }
@media (prefers-color-scheme: dark) { .dark { display: block; } .light { display: none; } }
"""


def page(groups: Mapping[str, Sequence[Result]], title: str) -> str:
    """The page for results grouped by benchmark."""
    sections = "\n".join(_section(name, group) for name, group in groups.items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>
<h1>{escape(title)}</h1>
<p>Average accuracy is the mean over the tasks seen so far, each measured again after every task. Forgetting is how far
a task has fallen from its best. Accuracies, forgetting and calibration error are in per cent, the NLL in nats.</p>
{sections}
</main></body></html>
"""


def _section(name: str, group: Sequence[Result]) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in COLUMNS)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows(group))
    text = escape(caption(group))
    figures = "".join(f'<div class="{theme}">{_svg(name, group, theme)}</div>' for theme in THEMES)
    return f"""<section><h2>{escape(name)}</h2>
<figure role="img" aria-label="Average accuracy against tasks seen on {escape(name)}; the table below has the numbers">
{figures}<figcaption>Bands: one standard deviation over the seeds.</figcaption></figure>
<div class="scroll" tabindex="0" role="region" aria-label="Results on {escape(name)}"><table>
<thead><tr>{head}</tr></thead><tbody>
{body}
</tbody></table></div><p>{text}</p></section>"""


def _svg(name: str, group: Sequence[Result], theme: str) -> str:
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": f"evcl {name} {theme}", "svg.fonttype": "none"}):
        accuracy_figure(group, theme=theme).savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]
