"""Reports: tables, figures and an HTML page from results.

In: folders of results, read by `evcl.experiments`. Out: tables for a terminal, Markdown, CSV and LaTeX; figures; a
page.
To change: what is shown, and how. The page loads nothing, and lists its scripts by their hashes (`html_page.py`);
`tests/report/test_browser.py` opens it. Fixed: a report is made without torch.
"""

from typing import TYPE_CHECKING

import evcl.experiments  # noqa: F401  (raises if msgspec is missing)
from evcl._core.lazy import lazily

if TYPE_CHECKING:
    from evcl.report.cells import Table
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
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "evcl.report.cells": "Table",
            "evcl.report.html_page": "page",
            "evcl.report.results": "Group Line by_benchmark find_results",
            "evcl.report.tables": "caption full_table main_table paired_difference paired_table percent rows "
            "short_columns tables_markdown",
            "evcl.report.written": "check_installed write_report",
        },
    )

__all__ = [
    "Group",
    "Line",
    "Table",
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
