"""All methods by name: which targets each can learn, and what settings add to it: coresets, or a memory of examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from evcl._core.errors import EvclError
from evcl._core.registry import Registry
from evcl._core.settings import Setting, Settings
from evcl.methods.method import Method
from evcl.targets import Likelihood


def check_targets(method: Method, settings: Settings, likelihood: Likelihood) -> None:
    """Refuse a method, or settings of it, that cannot learn targets of this likelihood."""
    if likelihood.softmax:
        return
    why = method.only_classes
    if not why and settings.get("memory"):
        if "memory" not in method.known_settings:  # it was added to a method that needs none
            raise EvclError(f"a memory keeps rows by class: leave memory out for {likelihood.name} targets")
        if not likelihood.keeps_rows or method.kept_as == "evidence":
            why = "its memory keeps equally many rows of each class"
    if not why and settings.get("importance") == "kfac":
        why = "Kronecker factors are measured on class probabilities"
    if why:
        raise EvclError(f"{method.name} learns classes only: {why}. For {likelihood.name} targets use evcl, vcl or ewc")


METHODS: Registry[Method] = Registry("method")
"""All methods, by name."""


def register(method: Method, *, overwrite: bool = False) -> Method:
    """Register a method of your own. It then works in `evcl run`, in `Learner` and in the contract tests."""
    if not isinstance(method, Method):
        raise EvclError(
            f"register takes an evcl.methods.Method, not {type(method).__name__}; see docs/own-method.md for an example"
        )
    METHODS.add(method.name, method, overwrite=overwrite)
    return method


def get(method: str | Method) -> Method:
    """Return the method of this name, or `method` itself if it is a Method."""
    return method if isinstance(method, Method) else METHODS[method]


def known_settings(method: Method, given: Mapping[str, object]) -> dict[str, Setting]:
    """The settings that a method takes: its own and, if `memory` is given, those of a memory of examples.

    `evcl` and its relatives then become `evcl-er`; any other method trains on the kept rows beside the new ones.
    """
    own = method.known_settings
    if "memory" not in given or "memory" in own:
        return own
    if why := _refused(method, given):
        raise EvclError(f"{method.name} cannot have a memory of examples: {why}", setting="memory")
    return remembering(method).known_settings


def _refused(method: Method, given: Mapping[str, object]) -> str:
    coreset = method.known_settings.get("coreset")
    if method.jointly:
        return "it learns all tasks at once"
    if coreset is not None and given.get("coreset", coreset.default) != "none":
        return "it keeps coresets"
    return method.no_memory


def remembering(method: Method) -> Method:
    """The method NAME with a memory of examples, as `NAME-er`; `naive` becomes `er`."""
    name = "er" if method.name == "naive" else f"{method.name}-er"
    if method.kept_as == "evidence":
        from evcl.methods.evcl_er import with_replay  # most methods are never made here, so they are not imported above

        return with_replay(method, name=name, summary="")
    from evcl.methods.rehearsal import REHEARSAL, with_memory

    return with_memory(method, name=name, summary="", settings={**method.settings, **REHEARSAL})


def for_settings(method: Method, s: Settings) -> Method:
    """The method that these settings compose: with coresets or a memory, if they ask for them and the method does not
    always have them, and without a likelihood per class if they do not want it. Its name says so: `evcl` with a memory
    is `evcl-er`, and `vcl` with random coresets `vcl-random-coreset`.
    """
    if s.get("memory", 0) and "memory" not in method.known_settings:
        method = remembering(method)
    if s.get("one_softmax"):
        method = replace(method, log_joint=None)
    chosen = s.get("coreset", "none") != "none" and "none" in method.known_settings["coreset"].choices
    if not chosen:
        return method
    from evcl.methods.coreset import with_coreset

    return with_coreset(method, name=f"{method.name}-{s.coreset}-coreset", summary="")
