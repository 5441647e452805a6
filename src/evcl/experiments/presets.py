"""Presets, named settings per benchmark and method: `tuned` (chosen on validation data), `default`, `paper` and
`authors`.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from evcl._core.errors import EvclError, unknown
from evcl._core.settings import CORESET, ELASTIC

if TYPE_CHECKING:
    from evcl.experiments.known import KnownMethod

SUMMARIES = {
    "tuned": "chosen on validation data; used if no preset is named",
    "default": "the defaults only, the same for every benchmark",
    "paper": "exactly the protocol of the EVCL paper",
    "authors": "the published protocol of each method, where there is one",
}
"""Maps each preset to a one-line summary."""


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("evcl.experiments").joinpath("presets.toml").read_text("utf-8"))


def preset(name: str, benchmark: str, method: KnownMethod, tasks: int | None = None) -> dict[str, Any]:
    """The settings that a preset gives a method on a benchmark; more specific tables win.

    The preset `authors` also says which `network` and how many `tasks` the authors used.

    A benchmark may have tables for one number of tasks (`"permuted-mnist:10"`), which then replace its other tables.

    In a preset, `"*"` stands for every benchmark or every method; `bayesian`, `elastic`, `distillation` and `coreset`
    stand for the methods that have those settings. A choice that a method does not offer is left out: a method named
    after its coreset, for example, has only that one.
    """
    if name not in SUMMARIES:
        raise unknown("preset", name, SUMMARIES, setting="preset")
    groups = ["*"]
    if method.bayesian:
        groups.append("bayesian")
    own = method.known_settings
    parts = {"elastic": ELASTIC.keys(), "distillation": {"distill", "distill_temperature"}, "coreset": CORESET.keys()}
    groups += [part for part, names in parts.items() if names <= own.keys()]
    found: dict[str, Any] = {}
    known = _table().get(name, {})
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
            found |= {key: value for key, value in tables.get(group, {}).items() if key in own}
        found |= tables.get(method.name, {})
    offered = {key: setting.choices for key, setting in own.items() if setting.choices}
    return {key: value for key, value in found.items() if key not in offered or value in offered[key]}
