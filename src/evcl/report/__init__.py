"""Reports: tables, figures and an HTML page from results.

In: folders of results, read by `evcl.experiments`. Out: tables for a terminal, Markdown, CSV and LaTeX; figures; a
page.
To change: what is shown, and how. The page loads nothing, and lists its script by its hash (`html_page.py`);
`tests/report/test_browser.py` opens it. Fixed: a report is made without torch.
"""

import evcl.experiments  # noqa: F401  (raises if msgspec is missing)
from evcl.report.html_page import page
from evcl.report.results import Group, Line, by_benchmark, find_results
from evcl.report.tables import (
    caption,
    full_table,
    main_table,
    paired_difference,
    paired_table,
    percent,
    rows,
    short_columns,
    tables_markdown,
)
from evcl.report.written import check_installed, write_report

__all__ = [
    "Group",
    "Line",
    "by_benchmark",
    "caption",
    "check_installed",
    "find_results",
    "full_table",
    "main_table",
    "page",
    "paired_difference",
    "paired_table",
    "percent",
    "rows",
    "short_columns",
    "tables_markdown",
    "write_report",
]
