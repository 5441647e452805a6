"""A method with what its settings add: coresets, or a memory of examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from evcl._core.errors import EvclError
from evcl._core.settings import Setting, Settings
from evcl.methods.method import Method


def known_settings(method: Method, given: Mapping[str, Any]) -> dict[str, Setting]:
    """The settings that a method takes: its own and, if `memory` is given, those of a memory of examples.

    `evcl` and its relatives then become `evcl-er`; any other method trains on the kept rows beside the new ones.
    """
    own = method.known_settings
    if "memory" not in given or "memory" in own:
        return own
    if why := _refused(method, given):
        raise EvclError(f"{method.name} cannot have a memory of examples: {why}", setting="memory")
    return remembering(method).known_settings


def _refused(method: Method, given: Mapping[str, Any]) -> str:
    coreset = method.known_settings.get("coreset")
    if method.jointly:
        return "it learns all tasks at once"
    if coreset is not None and given.get("coreset", coreset.default) != "none":
        return "it keeps coresets"
    return method.no_memory


def remembering(method: Method) -> Method:
    """The method with a memory of examples."""
    if method.kept_as == "evidence":
        from evcl.methods.evcl_er import with_replay  # most methods are never made here, so they are not imported above

        return with_replay(method)
    from evcl.methods.rehearsal import REHEARSAL, with_memory

    return with_memory(method, settings={**method.settings, **REHEARSAL})


def for_settings(method: Method, s: Settings) -> Method:
    """The method with coresets or a memory, if the settings ask for them and the method does not always have them, and
    without a likelihood per class if they do not want it.
    """
    if s.get("memory", 0) and "memory" not in method.known_settings:
        method = remembering(method)
    if s.get("one_softmax"):
        method = replace(method, log_joint=None)
    chosen = s.get("coreset", "none") != "none" and "none" in method.known_settings["coreset"].choices
    if not chosen:
        return method
    from evcl.methods.coreset import with_coreset

    return with_coreset(method)
