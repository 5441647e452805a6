"""Streams without boundaries: `evcl.Stream` learns rows in order, predicts before it learns, and notices changes.

In: rows in order, of arrays, files or a named source. Out: predictions, scores, alarms, a model file; no tasks.
To change: filters, experts and alarms, each a `State` of arrays by name. Fixed: golden numbers, and a row is
predicted before it is learned; files of earlier versions are read (`saved.py`).
"""

from typing import TYPE_CHECKING

from evcl._core.lazy import lazily

if TYPE_CHECKING:
    from evcl.streams.alarm import Alarm
    from evcl.streams.evaluation import Evaluation, evaluate
    from evcl.streams.prequential import Prequential
    from evcl.streams.sources import get
    from evcl.streams.stream import SETTINGS, Numbers, Report, Stream
else:  # torch takes seconds to import, and some commands do not need it
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "evcl.streams.alarm": "Alarm",
            "evcl.streams.evaluation": "Evaluation evaluate",
            "evcl.streams.prequential": "Prequential",
            "evcl.streams.sources": "get",
            "evcl.streams.stream": "SETTINGS Numbers Report Stream",
        },
        submodules=("sources",),
    )

__all__ = ["SETTINGS", "Alarm", "Evaluation", "Numbers", "Prequential", "Report", "Stream", "evaluate", "get"]
