"""Write the table of all methods into docs/methods/field.md, from the registry, the measured costs and `results/`.

    python experiments/field/write_methods.py

It stands between `<!-- methods -->` and `<!-- end methods -->`. The tests check that it is as this writes it.
"""

from __future__ import annotations

import re
from pathlib import Path

from write_tables import RESULTS, grid, groups

from evcl._core.catalogue import EXAMPLE_NETWORK, METHOD_FACTS, METHOD_SUMMARIES, measured
from evcl.methods import METHODS
from evcl.report import percent

PAGES = Path(__file__).parents[2] / "docs" / "methods"
DOCUMENT = PAGES / "field.md"
BEGIN, END = "<!-- methods -->\n", "<!-- end methods -->"
BENCHMARKS = ("permuted-digits", "split-digits")
COLUMNS = ("method", "idea", "paper", "scenarios", "keeps", "step", "uncertainty", *BENCHMARKS)
ALIGNED = ("---", "---", "---", "---", "---", "---:", "---", *["---:"] * len(BENCHMARKS))


def page_of() -> dict[str, str]:
    """Method -> the page that describes it, from the first table of docs/methods/index.md."""
    text = (PAGES / "index.md").read_text("utf-8").partition("## Which to choose")[0]
    rows = re.findall(r"^\| \[[^\]]*\]\(([\w-]+\.md)\) \| (.*) \|$", text, re.M)
    return {name: page for page, row in rows for name in re.findall(r"`([\w-]+)`", row) if name in METHOD_SUMMARIES}


def scenarios(name: str) -> str:
    """Those that a method has a means for. Where the task is not given, its weights must not depend on the task, and it
    must keep something; where classes are new as well, it must keep something of the inputs of the old ones.
    """
    method, keeps = METHODS[name], METHOD_FACTS[name].keeps
    film = method.known_settings.get("film")
    if method.needs_task or (film is not None and film.default) or keeps == "nothing":
        return "task"
    if any(word in keeps for word in ("examples", "class statistics", "VAE")):
        return "task, domain, class"
    return "task, domain"


def methods_table() -> str:
    pages, costs = page_of(), measured()[0][EXAMPLE_NETWORK]
    cells, _, _ = grid(groups(RESULTS, BENCHMARKS))
    rows = []
    for name, summary in METHOD_SUMMARIES.items():
        facts = METHOD_FACTS[name]
        accuracies = (cells.get((benchmark, name)) for benchmark in BENCHMARKS)
        rows.append([
            f"[`{name}`]({pages[name]})",
            summary,
            f"{facts.authors}, {facts.year}" if facts.year else facts.authors.replace("-", "\N{EN DASH}"),
            scenarios(name),
            facts.keeps,
            f"{costs[name]['step']:.1f}" if name in costs else "\N{EN DASH}",
            "yes" if METHODS[name].bayesian else "no",
            *("\N{EN DASH}" if line is None else percent(line.result.average_accuracy) for line in accuracies),
        ])  # fmt: skip
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (COLUMNS, ALIGNED, *rows))


def filled(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{methods_table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    DOCUMENT.write_text(filled(DOCUMENT.read_text("utf-8")), "utf-8")
