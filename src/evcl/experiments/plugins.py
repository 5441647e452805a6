"""Plugins: a user's own methods and benchmarks, in Python files or modules listed in EVCL_PLUGINS."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from evcl._core.errors import EvclError

VARIABLE = "EVCL_PLUGINS"


def load_plugins(more: Sequence[str] = ()) -> list[str]:
    """Import the plugins listed in EVCL_PLUGINS, separated by ':' (';' on Windows); each registers what it defines.

    `more` plugins are added to EVCL_PLUGINS, so that processes started from this one load them too. Returns
    all of them.
    """
    if more:
        os.environ[VARIABLE] = os.pathsep.join(filter(None, [os.environ.get(VARIABLE), *more]))
    names = [name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]
    for name in names:
        try:
            _load(name)
        except Exception as error:
            raise EvclError(f"plugin {name} cannot be imported: {type(error).__name__}: {error}") from error
    return names


def _load(name: str) -> None:
    path = Path(name)
    if path.suffix != ".py":
        importlib.import_module(name)
        return
    module_name = f"evcl_plugin:{path.resolve()}"
    if module_name in sys.modules:
        return
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    loader = importlib.machinery.SourceFileLoader(module_name, str(path))
    module = types.ModuleType(module_name)
    sys.modules[module_name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
