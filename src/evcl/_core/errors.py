"""What goes wrong, said in one line: what was expected, what came, what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self


class EvclError(ValueError):
    """Something the caller can put right; the message says how. `setting`: the name of the setting it is about."""

    def __init__(self, message: str = "", *, setting: str | None = None) -> None:
        super().__init__(message)
        self.setting = setting

    def within(self, where: str) -> Self:
        """The same error, saying where it happened: "task 'x': ..."."""
        found = type(self).__new__(type(self))  # its __init__ may want other arguments
        found.__dict__.update(self.__dict__)
        found.args = (f"{where}: {self}",)
        return found


class Diverged(EvclError):
    """The loss stopped being a number; the state from before the task is kept."""


class BadExample(EvclError):
    """An example of which nothing can be said; `row` is its number among those given, `what` is the matter with it."""

    def __init__(self, what: str, row: int | None = None) -> None:
        super().__init__(what if row is None else f"example {row}: {what}")
        self.what, self.row = what, row or 0


class UnknownName(EvclError, KeyError):
    """A name that is not in a table; a KeyError too, so that a table's `get` gives its default."""

    def __str__(self) -> str:
        return str(self.args[0])


class MissingExtra(EvclError, ImportError):
    """A package that comes with one of evcl's extras is not installed; an ImportError too, as Python's own would be."""


class NoWeight(EvclError, AttributeError):
    """A weight that a Bayesian layer does not have; an AttributeError too, so that `hasattr` says no."""


def unknown(kind: str, name: str, known: Iterable[str], *, setting: str | None = None) -> UnknownName:
    """An unknown name: the nearest known one if there is one, else all of them."""
    import difflib

    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
    return UnknownName(f"unknown {kind} {name!r}; {hint}", setting=setting)


def missing(extra: str, why: str) -> MissingExtra:
    """What is not installed, and the extra that installs it: `missing("tables", "Parquet needs pyarrow")`."""
    return MissingExtra(f"{why}: pip install 'evcl[{extra}]'")


@contextmanager
def extra(name: str, why: str) -> Iterator[None]:
    """Import in here what comes with an extra: a package that is not there raises `missing(name, why)`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing(name, why) from error
