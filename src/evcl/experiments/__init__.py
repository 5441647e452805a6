"""A configuration in, results on disk out."""

from evcl.experiments.parallel import cores, execute_all
from evcl.experiments.plugins import load_plugins
from evcl.experiments.presets import SUMMARIES, preset
from evcl.experiments.run import (
    RESULT,
    Config,
    Event,
    configure,
    execute,
    open_folder,
    read_result,
    where,
    write_result,
)
from evcl.experiments.tune import read_search, recipe, tune, write_json

__all__ = [
    "RESULT",
    "SUMMARIES",
    "Config",
    "Event",
    "configure",
    "cores",
    "execute",
    "execute_all",
    "load_plugins",
    "open_folder",
    "preset",
    "read_result",
    "read_search",
    "recipe",
    "tune",
    "where",
    "write_json",
    "write_result",
]
