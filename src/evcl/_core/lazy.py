"""Packages that import their names when they are first used (PEP 562), so that `evcl --help` starts without torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping


def lazily(
    package: str, names: Mapping[str, str], submodules: Iterable[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package. `names` maps each module to the names it exports, separated by
    spaces; `submodules` become attributes too.
    """
    sources = {name: module for module, some in names.items() for name in some.split()}
    modules = frozenset(submodules)

    def get(name: str) -> object:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name not in sources:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(sources[name]), name)
        setattr(sys.modules[package], name, value)  # from now on Python finds it without this function
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *sources, *modules})

    return get, list_names
