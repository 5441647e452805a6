"""A configuration in, results on disk out."""

from evcl.experiments.paper import PAPER_BENCHMARKS, PAPER_METHODS, Forecast, reproduce
from evcl.experiments.parallel import cores, execute_all
from evcl.experiments.plugins import load_plugins
from evcl.experiments.presets import SUMMARIES, preset
from evcl.experiments.resume import SECONDS, open_checkpoints
from evcl.experiments.run import (
    RESULT,
    Config,
    Event,
    check_writable,
    configure,
    execute,
    open_folder,
    read_result,
    where,
    write_result,
)
from evcl.experiments.search import best_trial, read_found, read_search, recipe, result_name, tune
from evcl.training import Checkpoints, Stopped

__all__ = [
    "PAPER_BENCHMARKS",
    "PAPER_METHODS",
    "RESULT",
    "SECONDS",
    "SUMMARIES",
    "Checkpoints",
    "Config",
    "Event",
    "Forecast",
    "Stopped",
    "best_trial",
    "check_writable",
    "configure",
    "cores",
    "execute",
    "execute_all",
    "load_plugins",
    "open_checkpoints",
    "open_folder",
    "preset",
    "read_found",
    "read_result",
    "read_search",
    "recipe",
    "reproduce",
    "result_name",
    "tune",
    "where",
    "write_result",
]
