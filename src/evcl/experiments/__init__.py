"""Experiments: run configurations, and store their results on disk."""

from evcl.experiments.cells import MakeEngine, work
from evcl.experiments.engines import Died, cores, local
from evcl.experiments.folder import check_writable, claimed, open_folder, write_result
from evcl.experiments.paper import PAPER_BENCHMARKS, PAPER_METHODS, Forecast, reproduce
from evcl.experiments.parallel import execute_all
from evcl.experiments.plugins import load_plugins
from evcl.experiments.presets import SUMMARIES, preset
from evcl.experiments.result import RESULT, Environment, Result, Summary, merge, read_result
from evcl.experiments.resume import SECONDS, open_checkpoints
from evcl.experiments.run import MOST_SEEDS, Config, Event, configure, execute, where
from evcl.experiments.search import best_trial, read_found, read_search, recipe, result_name, tune, write_found
from evcl.experiments.store import CELLS, HIDDEN, Failure, Store
from evcl.experiments.sweep import Standing, read_sweep, standing, varied
from evcl.training import Checkpoints, Stopped

__all__ = [
    "CELLS",
    "HIDDEN",
    "MOST_SEEDS",
    "PAPER_BENCHMARKS",
    "PAPER_METHODS",
    "RESULT",
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
    "recipe",
    "reproduce",
    "result_name",
    "standing",
    "tune",
    "varied",
    "where",
    "work",
    "write_found",
    "write_result",
]
