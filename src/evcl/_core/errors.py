"""Errors. Each message is one line: what was expected, what was given, and what to do."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self


class EvclError(ValueError):
    """An error that the caller can fix; the message says how.

    Attributes:
        setting: the name of the setting at fault, or None
    """

    def __init__(self, message: str = "", *, setting: str | None = None) -> None:
        super().__init__(message)
        self.setting = setting

    def within(self, where: str) -> Self:
        """Return the same error with its location put before the message: "task 'x': ..."."""
        error = type(self).__new__(type(self))  # a subclass's __init__ may take other arguments
        error.__dict__.update(self.__dict__)
        error.args = (f"{where}: {self}",)
        return error


class Diverged(EvclError):
    """The loss became NaN or infinite; the state from before the task is kept."""


class ForgettingWarning(UserWarning):
    """A task is likely to make the learner forget something."""


class BadExample(EvclError):
    """An example that cannot be used. `row` is its index among those given, and `what` is what is wrong with it."""

    def __init__(self, what: str, row: int | None = None) -> None:
        super().__init__(what if row is None else f"example {row}: {what}")
        self.what, self.row = what, row or 0


class UnknownName(EvclError, KeyError):
    """A name that is not in a registry. It is also a KeyError, so that the registry's `get` returns its default."""

    def __str__(self) -> str:
        return str(self.args[0])


class MissingExtra(EvclError, ImportError):
    """A package of one of evcl's extras is not installed. It is also an ImportError, like Python's own error."""


class NoWeight(EvclError, AttributeError):
    """A weight that a Bayesian layer does not have. It is also an AttributeError, so that `hasattr` returns False."""

    def __init__(self, layer: object, name: str, where: str = "", instead: str = "call the layer") -> None:
        kind = type(layer).__name__
        where = f"{where!r} ({kind})" if where else kind
        super().__init__(f"{where}: a Bayesian layer has no {name!r} to use directly: {instead}")
        self.layer = layer


def unknown(kind: str, name: str, known: Iterable[str], *, setting: str | None = None) -> UnknownName:
    """Make the error for an unknown name. It suggests the closest known name, or lists all of them if none is close."""
    import difflib

    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
    return UnknownName(f"unknown {kind} {name!r}; {hint}", setting=setting)


def brief(value: object, most: int = 200) -> str:
    """A value as an error shows it: `repr`, cut if it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python does not convert an integer of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= most else f"{text[:most]}..."


def retired(name: str, why: str = "nothing in evcl uses it") -> None:
    """Warn of the use of a public name that goes in the next minor release; see docs/policy.md."""
    warnings.warn(f"{name} is deprecated, and stops working in evcl 0.4: {why}", DeprecationWarning, stacklevel=3)


def missing(extra: str, why: str) -> MissingExtra:
    """The error for a missing package, which names the extra: `missing("tables", "Parquet needs pyarrow")`."""
    return MissingExtra(f"{why}: pip install 'evcl[{extra}]'")


@contextmanager
def extra(name: str, why: str) -> Iterator[None]:
    """Import packages of an extra in this block. If one is not installed, `missing(name, why)` is raised."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing(name, why) from error
