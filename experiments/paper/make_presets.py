"""Write the presets that the searches chose into presets.toml: `python experiments/paper/make_presets.py`.

For each benchmark and method, `tuned` has the trial that was best when the last search that tried both measured its
best trials again. The tests check that the file is what this program writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evcl._core.settings import renamed
from evcl.experiments import PAPER_BENCHMARKS, PAPER_METHODS, best_trial, configure, result_name
from evcl.methods import METHODS

HERE = Path(__file__).parent
SEARCHES = HERE / "search"
PRESETS = HERE.parents[1] / "src" / "evcl" / "experiments" / "presets.toml"
MARK = (
    "# --- The rest is written by experiments/paper/make_presets.py from the searches, which use validation data only\n"
)
TUNED = (  # in the order in which they were run
    "digits-3", "paper-4-split", "paper-5-cifar10", "paper-6-split", "paper-6-permuted",
    "paper-7-split-mnist", "paper-7-split-notmnist", "paper-7-split-fashion-mnist", "paper-7-split-cifar10",
    "paper-7-permuted-mnist", "paper-8-split-notmnist", "ten-tasks-2",
    "paper-9-split-mnist", "paper-9-split-notmnist", "paper-9-split-fashion-mnist", "paper-9-split-cifar10",
)  # fmt: skip
DIGITS = ("permuted-digits", "split-digits")
TEN = {"permuted-mnist:10": ("evcl", "vcl", "ewc")}
LWF = ("split-mnist", "split-notmnist", "split-fashion-mnist", "split-cifar10")  # where it differs from naive training
FIELD = HERE.parent / "field" / "search"
SEARCHED_THERE = {  # benchmark -> method -> the search in FIELD that has its best trial
    # The search `digits-3` is older than the domains of EVCL, and chose settings that are worse than its defaults.
    "permuted-digits": {"evcl": "permuted-digits"},
    "split-cifar10-conv": {
        **dict.fromkeys(("naive", "joint", "ewc", "lwf"), "split-cifar10-conv"),
        "evcl": "split-cifar10-conv-near",
        **dict.fromkeys(("er", "derpp", "evcl-er"), "split-cifar10-conv-task-200"),
    },
}


def found(search: str, benchmark: str) -> dict[str, Any] | None:
    path = SEARCHES / search / result_name(benchmark)
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def table(name: str, benchmark: str, method: str, result: dict[str, Any], settings: dict[str, Any]) -> str:
    """A TOML table of all settings in which a trial differs from the method's defaults.

    The searches are older than the Kronecker posterior, so that EVCL keeps a diagonal one; than the preset `paper` with
    the Fisher of the last task alone, so that Fishers add up; and than the domains of EVCL, so a stream whose tasks
    share a head keeps one softmax (`one_softmax`). On other streams that setting has no effect, and is left out.
    """
    usual = {key: setting.default for key, setting in METHODS[method].known_settings.items()}
    then = {"posterior": "diagonal"} | ({"fisher_decay": 1.0} if result["preset"] == "paper" else {})
    given = {**{key: value for key, value in then.items() if key in usual}, **renamed(settings)}
    resolved = configure(benchmark.partition(":")[0], method, result["preset"], given=given).settings
    given = {key: value for key, value in resolved.items() if value != usual.get(key, value)}
    if not benchmark.startswith("permuted"):
        given.pop("one_softmax", None)
    return "\n".join(
        [
            f"[{name}]",
            *(f"{json.dumps(key) if '.' in key else key} = {json.dumps(value)}" for key, value in given.items()),
        ]
    )


def tuned(benchmark: str, method: str) -> str:
    """The preset's table for a benchmark and a method."""
    each = [(search, result) for search in TUNED if (result := found(search, benchmark)) and method in result["tried"]]
    search, result = each[-1]
    trial = best_trial(result, method)
    accuracy = f"{100 * trial['mean']:.2f} +- {100 * trial['std']:.2f} over {len(trial['per_seed'])} seeds"
    made = table(
        f'tuned."{benchmark}".{method}' if ":" in benchmark else f"tuned.{benchmark}.{method}",
        benchmark,
        method,
        result,
        trial["settings"],
    )
    return f"# experiments/paper/search/{search}, {result['date']}: {accuracy}\n{made}"


def of_the_field(benchmark: str, method: str) -> str:
    """The preset's table for a benchmark and a method of SEARCHED_THERE."""
    search = SEARCHED_THERE[benchmark][method]
    result = json.loads((FIELD / search / f"{method}.json").read_text("utf-8"))
    trial = best_trial(result, method)
    found = table(f"tuned.{benchmark}.{method}", benchmark, method, result, trial["settings"])
    return f"# experiments/field/search/{search}, {result['date']}: {100 * trial['mean']:.2f}, one seed\n{found}"


def made() -> str:
    wanted = {**dict.fromkeys((*DIGITS, *PAPER_BENCHMARKS), PAPER_METHODS), **TEN}
    wanted |= dict.fromkeys(LWF, (*PAPER_METHODS, "lwf"))
    tables = [
        tuned(benchmark, method)
        for benchmark, methods in wanted.items()
        for method in methods
        if method not in SEARCHED_THERE.get(benchmark, {})
    ]
    tables += [of_the_field(benchmark, method) for benchmark, methods in SEARCHED_THERE.items() for method in methods]
    return MARK + "\n" + "\n\n".join(tables) + "\n"


def filled(text: str) -> str:
    """The file with everything below the mark written again."""
    return text.partition(MARK)[0] + made()


if __name__ == "__main__":
    PRESETS.write_text(filled(PRESETS.read_text("utf-8")), "utf-8")
