"""Run each method by its authors' protocol (`--preset authors`), and compare with the figure that they published.

    python experiments/authors/reproduce.py run --device cuda     # all protocols, or those named: si:split-mnist
    python experiments/authors/reproduce.py table                 # writes the table in docs/RESULTS.md

A result that is there already is not computed again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from evcl.experiments import RESULT, configure, execute_all, open_folder, read_result, write_result

HERE = Path(__file__).parent
RESULTS = HERE / "results"
DOCUMENT = HERE.parents[1] / "docs" / "RESULTS.md"
BEGIN, END = "<!-- authors -->\n", "<!-- end authors -->"

# Half of the authors' width and epochs: 100 tasks in minutes.
SMALL = (("network", "1000x1000, dropout 0.5, input dropout 0.2"), ("epochs", 10))


class Protocol(NamedTuple):
    method: str
    benchmark: str
    published: str  # accuracy in per cent, as far as it can be read
    source: str
    seeds: int = 5
    scenario: str = ""  # if not the preset's
    given: tuple[tuple[str, Any], ...] = ()  # other settings than the preset's

    @property
    def name(self) -> str:
        return ":".join(part for part in (self.method, self.benchmark, self.scenario) if part)

    @property
    def folder(self) -> Path:
        return RESULTS / "-".join(part for part in (self.benchmark, self.scenario) if part) / self.method


PROTOCOLS = (
    Protocol("si", "permuted-mnist", "about 97", "Zenke et al. (2017), a figure", 3),
    Protocol("si", "split-mnist", "about 99", "Zenke et al. (2017), a figure"),
    Protocol("ewc", "split-mnist", "99.12", "van de Ven (2025), exact Fisher"),
    Protocol("imm-mode", "permuted-mnist", "98.0", "Lee et al. (2017)", 3),
    Protocol("imm-mean", "permuted-mnist", "93 to 98", "Lee et al. (2017)", 3),
    Protocol("improved-vcl", "permuted-mnist", "93", "Swaroop et al. (2019)", 3),
    Protocol("improved-vcl", "split-mnist", "98.4", "Swaroop et al. (2019)"),
    Protocol("gvcl", "split-mnist", "94.6", "Loo et al. (2021)"),
    Protocol("gvcl-film", "split-mnist", "98.6", "Loo et al. (2021)"),
    Protocol("kfac-ewc", "permuted-mnist", "above 90", "Ritter et al. (2018)", 3),
    Protocol("xdg", "permuted-mnist", "95.4", "Masse et al. (2018), 2000-2000, 20 epochs", 1, given=SMALL),
    Protocol("vogn", "permuted-mnist", "93 to 94", "Osawa et al. (2019), a figure", 3),
    Protocol("er", "split-mnist", "80.4", "Arani et al. (2022), 200 examples"),
    Protocol("derpp", "split-mnist", "85.6", "Arani et al. (2022), 200 examples"),
    Protocol("dgr", "split-mnist", "about 95.7", "van de Ven et al. (2022), a figure", scenario="domain"),
    Protocol("dgr", "split-mnist", "about 90", "van de Ven et al. (2022), a figure", scenario="class"),
    Protocol("fromp", "split-mnist", "99.3", "Pan et al. (2020)"),
    Protocol("fromp", "permuted-mnist", "94.8", "Pan et al. (2020)", 3),
)


def run(wanted: list[str], device: str, precision: str | None) -> None:
    for one in PROTOCOLS:
        if wanted and one.name not in wanted:
            continue
        given = {**({"scenario": one.scenario} if one.scenario else {}), **dict(one.given)}
        seeds = range(one.seeds)
        config = configure(one.benchmark, one.method, "authors", seeds, None, given, device, precision)
        if open_folder(one.folder, config) is None:
            ((_, result),) = execute_all([config], lambda *_: None)
            write_result(one.folder, result)
        print(row(one), flush=True)


def row(one: Protocol) -> str:
    result = read_result(one.folder / RESULT)
    found, network = result.average_accuracy, "-".join(map(str, result.config["hidden"]))
    assert found.mean is not None
    error = "" if found.std is None else f" ± {100 * found.std / one.seeds**0.5:.2f}"
    scenario = f" ({result.config['scenario']}-incremental)" if "scenario" in result.config else ""
    about = f"{one.benchmark}{scenario}, {result.tasks} tasks, {network}, {result.config['epochs']} epochs"
    return (
        f"| `{one.method}` | {about} | {one.published} | {one.source} | {100 * found.mean:.2f}{error} | {one.seeds} |"
    )


def filled(text: str) -> str:
    """The document with the table of all results that are there."""
    head = ["| method | protocol | published | source | here | seeds |", "|---|---|---|---|---|---|"]
    rows = [row(one) for one in PROTOCOLS if (one.folder / RESULT).exists()]
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + "\n".join([*head, *rows]) + "\n\n" + END + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("protocols", nargs="*", help="such as si:split-mnist [all]")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision")
    options = parser.parse_args()
    known = [one.name for one in PROTOCOLS]
    for name in options.protocols:
        if name not in known:
            parser.error(f"unknown protocol {name!r}; known: {', '.join(known)}")
    if options.what == "run":
        run(options.protocols, options.device, options.precision)
    else:
        DOCUMENT.write_text(filled(DOCUMENT.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
