"""Write the tables of streams without labels into docs/RESULTS.md, and draw their figures, from the results here.

    python experiments/generative/generative_tables.py    # also figures and a page, as `evcl report` does

Of the language stream, log-likelihoods are also given as bits per character.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from evcl.benchmarks.language import SOTU_DECADES, bits_per_character
from evcl.experiments.compare import between
from evcl.report import Group, Line, by_benchmark, find_results, full_table, paired_table, write_report

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "RESULTS.md"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bits(line: Line) -> list[str]:
    """Bits per character: of each decade when it was learned, after the last one, and of the first decade then."""
    each = np.vectorize(bits_per_character)(line.matrices)  # [seed, after, on]
    after = each[:, -1]
    learned = np.array([matrix.diagonal() for matrix in each])
    measured = (learned.mean(1), after.mean(1), (after - learned)[:, :-1].mean(1), after[:, 0])
    return [line.label, *(f"{one.mean():.3f} ± {one.std(ddof=1) if len(one) > 1 else 0:.3f}" for one in measured)]


def section(group: Group) -> str:
    parts = [f"### {group.name}", full_table(group).markdown()]
    if (paired := paired_table(group)) is not None:
        parts.append(paired.markdown())
    if group.lines[0].result.benchmark == SOTU_DECADES:
        columns = (
            "method",
            "when learned",
            "after the last decade",
            "change since learned",
            "the first decade, at the end",
        )
        parts.append("Bits per character, mean and standard deviation over seeds:")
        parts.append(table(columns, [bits(line) for line in group.lines]))
    return "\n\n".join(part.strip("\n") for part in parts)


def filled(text: str, folder: Path = HERE / "results") -> str:
    """A document with its tables written again."""
    groups = by_benchmark(find_results(folder))
    return between(text, "without labels", "\n\n".join(section(group) for group in groups.values()))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=HERE, help="where search_and_test.py has written its results [here]"
    )
    folder = parser.parse_args(words).folder
    DOCUMENT.write_text(filled(DOCUMENT.read_text("utf-8"), folder / "results"), "utf-8")
    write_report(folder / "results", "Generative models and language models")


if __name__ == "__main__":
    main()
