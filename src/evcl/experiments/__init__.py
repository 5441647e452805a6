"""Experiments: run configurations, and store their results on disk.

In: a `Config`: one benchmark, one method, settings, seeds. Out: a `Result` for each, on disk once; sweeps and
searches.
To change: scheduling (`parallel.py`, engines). Fixed: `result.json` and a cell's key (`store.py`);
increase `NUMBERS` with every change after which the same settings give different numbers (`tests/test_golden.py`).
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from evcl._core.errors import missing
from evcl._core.lazy import lazily

if find_spec("msgspec") is None:  # not imported here, because evcl --help does not need it
    raise missing("cli", "evcl.experiments needs msgspec")

if TYPE_CHECKING:
    from evcl.experiments.config import MOST_SEEDS, Config, configure, where
    from evcl.experiments.engines import Died, cores, local
    from evcl.experiments.folder import SECONDS, check_writable, claimed, open_checkpoints, open_folder, write_result
    from evcl.experiments.known import SUMMARIES, preset
    from evcl.experiments.paper import PAPER_BENCHMARKS, PAPER_METHODS, Forecast, reproduce
    from evcl.experiments.parallel import MakeEngine, execute_all, work
    from evcl.experiments.plugins import load_plugins
    from evcl.experiments.reading import read_result
    from evcl.experiments.result import (
        CELLS,
        HIDDEN,
        RESULT,
        SCORES,
        Environment,
        Result,
        Score,
        Summary,
        merge,
        score_of,
    )
    from evcl.experiments.run import Event, execute
    from evcl.experiments.search import best_trial, read_found, read_search, read_sweep, result_name, tune, write_found
    from evcl.experiments.store import Failure, Standing, Store, standing, varied
    from evcl.training import Checkpoints, Stopped
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "evcl.experiments.config": "MOST_SEEDS Config configure where",
            "evcl.experiments.engines": "Died cores local",
            "evcl.experiments.folder": "SECONDS check_writable claimed open_checkpoints open_folder write_result",
            "evcl.experiments.paper": "PAPER_BENCHMARKS PAPER_METHODS Forecast reproduce",
            "evcl.experiments.parallel": "MakeEngine execute_all work",
            "evcl.experiments.plugins": "load_plugins",
            "evcl.experiments.known": "SUMMARIES preset",
            "evcl.experiments.reading": "read_result",
            "evcl.experiments.result": "CELLS HIDDEN RESULT SCORES Environment Result Score Summary merge score_of",
            "evcl.experiments.run": "Event execute",
            "evcl.experiments.search": "best_trial read_found read_search read_sweep result_name tune write_found",
            "evcl.experiments.store": "Failure Standing Store standing varied",
            "evcl.training": "Checkpoints Stopped",
        },
    )

__all__ = [
    "CELLS",
    "HIDDEN",
    "MOST_SEEDS",
    "PAPER_BENCHMARKS",
    "PAPER_METHODS",
    "RESULT",
    "SCORES",
    "SECONDS",
    "SUMMARIES",
    "Checkpoints",
    "Config",
    "Died",
    "Environment",
    "Event",
    "Failure",
    "Forecast",
    "MakeEngine",
    "Result",
    "Score",
    "Standing",
    "Stopped",
    "Store",
    "Summary",
    "best_trial",
    "check_writable",
    "claimed",
    "configure",
    "cores",
    "execute",
    "execute_all",
    "load_plugins",
    "local",
    "merge",
    "open_checkpoints",
    "open_folder",
    "preset",
    "read_found",
    "read_result",
    "read_search",
    "read_sweep",
    "reproduce",
    "result_name",
    "score_of",
    "standing",
    "tune",
    "varied",
    "where",
    "work",
    "write_found",
    "write_result",
]
