"""Import other libraries where they are installed."""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.util import find_spec
from types import ModuleType

import pytest


def needed(package):
    """Import a package of someone else's, or skip the tests of this file.

    Avalanche, Continuum and laplace-torch import torchvision, whose compiled part cannot be loaded beside a torch of
    another build. Nothing here uses that part, but torchvision then fails to describe its operators to torch, in a
    module of its own: this leaves that module out.
    """
    if find_spec(package) is None:
        pytest.skip(f"needs {package}: make test-integrations installs it", allow_module_level=True)
    sys.modules.setdefault("torchvision._meta_registrations", ModuleType("torchvision._meta_registrations"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(package)
