"""The environment variables that torchrun sets for its processes, read without importing torch."""

from __future__ import annotations

import os

from evcl._core.errors import EvclError


def world() -> int:
    """How many processes torchrun started; 1 if it did not."""
    return number("WORLD_SIZE", 1)


def own() -> int:
    """This process's number among them; 0 if it is the only one."""
    return number("RANK") if world() > 1 else 0


def number(name: str, default: int | None = None) -> int:
    """A variable that torchrun sets to a whole number."""
    text = os.environ.get(name, default)
    try:
        return int(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise EvclError(f"{name} must be a whole number, as set by torchrun, not {text!r}") from None
