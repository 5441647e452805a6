"""The streams that are reported, named once."""

from __future__ import annotations

from evcl._core.catalogue import BENCHMARK_SUMMARIES
from evcl.streams.sources.drifting import Drift
from evcl.streams.sources.generators import generated
from evcl.streams.sources.real import READ, real
from evcl.streams.sources.source import Source, register

GENERATED_ROWS = 100_000  # of a generated stream
_AT = (5_000, 15_000, 50_000)  # changes within the first 20,000 rows too, which are reported separately
_DRIFTS = {
    "stagger": Drift((0, 1, 2), (5_000, 50_000)),
    "sea": Drift((0, 1, 2, 3), _AT),
    "agrawal": Drift((0, 2, 6, 8), _AT, width=4_000),
    "hyperplane": Drift((0, 1, 2, 3), _AT, width=10_000),
    "led": Drift((*(0, 1) * 12, 0), tuple(range(4_000, GENERATED_ROWS, 4_000))),
    "rbf": Drift(),
}
REPORTED: tuple[Source, ...] = (
    *map(real, READ),
    *(generated(name, how, GENERATED_ROWS, name, BENCHMARK_SUMMARIES[name]) for name, how in _DRIFTS.items()),
)
"""The streams on which the library is compared with others. Settings are chosen on other ones."""
for _source in REPORTED:
    register(_source)


def table() -> list[dict[str, str | int]]:
    """Name, rows, inputs, classes and drift of the reported streams."""
    counted = [(one, {"rows": one.rows, "inputs": len(one.names), "classes": len(one.classes)}) for one in REPORTED]
    return [{"name": one.name, **counts, "drift": one.drift} for one, counts in counted]
