"""What readers of results need to know of benchmarks and methods, without torch.

Of those that come with the library it is in `known.json`, which `python tests/experiments/test_known.py` writes; a
user's own are known if they have been registered.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from evcl._core.catalogue import BENCHMARK_SUMMARIES
from evcl._core.errors import EvclError, unknown
from evcl._core.settings import CORESET, ELASTIC, Setting
from evcl.experiments.config_file import Space

if TYPE_CHECKING:
    from evcl.benchmarks import Entry
    from evcl.methods import Method


class KnownBenchmark(NamedTuple):
    """A benchmark as a report shows it."""

    summary: str
    tasks: int  # the default number
    score: str  # what it is judged by
    kind: str  # whose methods it has: a key of "methods" in the file


_OF_KIND = {None: "tasks", "rows": "rows", "agents": ""}  # those of agents depend on the stream


class KnownMethod(NamedTuple):
    """A method as a preset and a report use it."""

    name: str
    bayesian: bool
    jointly: bool
    known_settings: Mapping[str, Setting]


@cache
def _table(name: str) -> dict[str, Any]:
    """The contents of a file beside this one."""
    text = files("evcl.experiments").joinpath(name).read_text("utf-8")
    table: dict[str, Any] = (json if name.endswith("json") else tomllib).loads(text)
    return table


def known_benchmark(name: str) -> KnownBenchmark | None:
    """The benchmark of this name; None if there is none."""
    if name in BENCHMARK_SUMMARIES:
        return KnownBenchmark(BENCHMARK_SUMMARIES[name], **_table("known.json")["benchmarks"][name])
    if "evcl.benchmarks" in sys.modules:  # otherwise nothing has been registered
        from evcl.benchmarks import BENCHMARKS

        if name in BENCHMARKS:
            entry: Entry = BENCHMARKS[name]
            return KnownBenchmark(entry.summary, entry.tasks, entry.score, _OF_KIND[entry.kind] or name)
    return None


@cache
def _stored(kind: str, name: str) -> KnownMethod:
    entry = _table("known.json")["methods"][kind][name]
    settings = {
        key: Setting(value[0], "", choices=tuple(value[1])) if isinstance(value, list) else Setting(value, "")
        for key, value in entry["settings"].items()
    }
    return KnownMethod(name, entry["bayesian"], entry["jointly"], settings)


def known_method(benchmark: str, name: str) -> KnownMethod | None:
    """The method of this name with the settings that it has on a benchmark; None if there is none."""
    about = known_benchmark(benchmark)
    kind = "tasks" if about is None else about.kind
    if name in _table("known.json")["methods"].get(kind, {}):
        return _stored(kind, name)
    if "evcl.methods" not in sys.modules:
        return None
    from evcl.experiments.config import method_of
    from evcl.methods import METHODS

    try:
        one = METHODS[name] if about is None else method_of(benchmark, name)
    except EvclError:
        return None
    return KnownMethod(one.name, one.bayesian, one.jointly, one.known_settings)


SUMMARIES = {
    "tuned": "chosen on validation data; used if no preset is named",
    "default": "the defaults only, the same for every benchmark",
    "paper": "exactly the protocol of the EVCL paper",
    "authors": "the published protocol of each method, where there is one",
}
"""Maps each preset to a one-line summary."""


def preset(name: str, benchmark: str, method: KnownMethod | Method, tasks: int | None = None) -> Space:
    """The settings that a preset gives a method on a benchmark; more specific tables win.

    The preset `authors` also says which `network` and how many `tasks` the authors used.

    A benchmark may have tables for one number of tasks (`"permuted-mnist:10"`), which then replace its other tables.

    In a preset, `"*"` stands for every benchmark or every method; `bayesian`, `elastic`, `distillation`, `inference`
    and `coreset` stand for the methods that have those settings. A choice that a method does not offer is left out: a
    method named after its coreset, for example, has only that one.
    """
    if name not in SUMMARIES:
        raise unknown("preset", name, SUMMARIES, setting="preset")
    groups = ["*"]
    if method.bayesian:
        groups.append("bayesian")
    own = method.known_settings
    parts = {"elastic": ELASTIC.keys(), "distillation": {"distill"}, "coreset": CORESET.keys()}
    parts["inference"] = {"one_softmax"}
    groups += [part for part, names in parts.items() if names <= own.keys()]
    space: Space = {}
    known = _table("presets.toml").get(name, {})
    if name == "authors" and method.name not in known.get(benchmark, {}):
        published = [one for one, tables in known.items() if method.name in tables]
        there = sorted(known.get(benchmark, {}))
        has = f"{method.name} only on {' and '.join(published)}" if published else f"only {', '.join(there)} there"
        if not published and not there:
            has = f"only {' and '.join(one for one in known if one != '*')}"
        raise EvclError(f"the preset authors has no {method.name} on {benchmark}; it has {has}", setting="preset")
    counted = f"{benchmark}:{tasks}"
    for scope in ("*", counted if method.name in known.get(counted, {}) else benchmark):
        tables = known.get(scope, {})
        for group in groups:
            space |= {key: value for key, value in tables.get(group, {}).items() if key in own}
        space |= tables.get(method.name, {})
    offered = {key: setting.choices for key, setting in own.items() if setting.choices}
    return {key: value for key, value in space.items() if key not in offered or value in offered[key]}
