"""What the commands share: wrong usage, and --set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from evcl._core.errors import EvclError


class Usage(EvclError):
    """Wrong usage: exit status 2."""


@contextmanager
def usage() -> Iterator[None]:
    """What goes wrong in here is the command's fault, not the run's."""
    try:
        yield
    except EvclError as error:
        raise Usage(str(error), setting=error.setting) from error


def settings(pairs: list[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name or not value:
            raise Usage(f"--set takes name=value, not {pair!r}")
        if name in found:
            raise Usage(f"--set {name} is given twice")
        found[name] = value
    return found
