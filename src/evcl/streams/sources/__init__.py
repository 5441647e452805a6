"""Named streams: real data by package registry, and generated streams with drift.

In: a name. Out: labelled rows in a fixed order, in pieces, so that their number does not matter for memory.
To change: sources can be added (`register`). Fixed: the rows of each, which are part of its results.
"""

from evcl.streams.sources.drifting import Drift, drift
from evcl.streams.sources.generators import RULES, Rule, generated
from evcl.streams.sources.reported import REPORTED, table
from evcl.streams.sources.source import SOURCES, Rows, Source, get, register

__all__ = [
    "REPORTED",
    "RULES",
    "SOURCES",
    "Drift",
    "Rows",
    "Rule",
    "Source",
    "drift",
    "generated",
    "get",
    "register",
    "table",
]
