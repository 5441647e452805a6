"""Search settings and test methods on streams without labels; `generative_tables.py` then writes tables and figures.

    python experiments/generative/search_and_test.py characters-mnist characters-notmnist --device cuda
    python experiments/generative/search_and_test.py sotu-decades --device cuda

Without a benchmark, it does all of them. What is there already is not done again, and what was stopped resumes. Results
are in `results/BENCHMARK/METHOD/result.json`, all trials in `search/BENCHMARK/METHOD.json`.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evcl.experiments import Config, configure
from evcl.experiments.compare import Plan, add_options, prepare, search, test
from evcl.experiments.search import Search
from evcl.methods import METHODS

HERE = Path(__file__).parent
PLAN: dict[str, Any] = tomllib.loads((HERE / "generative.toml").read_text("utf-8"))
BENCHMARKS: dict[str, Any] = PLAN["benchmarks"]


def search_of(benchmark: str, methods: Sequence[str]) -> Search:
    """The search for these methods' settings."""
    spaces = {}
    for method in methods:
        known = METHODS[method].known_settings
        common = {name: value for name, value in BENCHMARKS[benchmark]["common"].items() if name in known}
        spaces[method] = common | BENCHMARKS[benchmark].get("ranges", {}).get(method, PLAN["ranges"][method])
    return Search(
        benchmarks=(benchmark,),
        validation=PLAN["validation"],
        seeds=tuple(PLAN["search_seeds"]),
        trials=PLAN["trials"],
        preset="default",
        methods=spaces,
    )


def config_of(
    benchmark: str, method: str, settings: Mapping[str, Any], device: str = "cpu", precision: str | None = None
) -> Config:
    """The configuration that meets the test data, with these settings of the best trial."""
    seeds = BENCHMARKS[benchmark]["test_seeds"]
    return configure(benchmark, method, "default", seeds, None, settings, device, precision)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmarks", nargs="*", metavar="benchmark", help=f"of {', '.join(BENCHMARKS)} [all]")
    parser.add_argument("--methods", nargs="+", help="names of methods [all of the benchmark]")
    add_options(parser, HERE)
    args = parser.parse_args(words)
    where, plan = prepare(args), Plan(search_of, config_of)
    for benchmark in args.benchmarks or BENCHMARKS:
        wanted = args.methods or BENCHMARKS[benchmark]["methods"]
        search(plan, args.folder, benchmark, wanted, *where)
        test(plan, args.folder, benchmark, wanted, *where)


if __name__ == "__main__":
    main()
