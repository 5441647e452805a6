"""What a piece of work calls, as Python's profiler sees it: nothing has to be replaced in order to count or hear it."""

from __future__ import annotations

import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import FrameType
from typing import Any


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often a block calls each function, of Python and C, by its qualified name, in the order of first calls."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, called: object) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            calls[getattr(called, "__qualname__", "")] += 1

    with _profiled(note):
        yield calls


@contextmanager
def heard(name: str, hear: Callable[..., None], event: str = "call") -> Iterator[None]:
    """Hand the arguments of each call of the function with this qualified name to `hear`, by name; all variables, if
    the event is its "return". The name may begin with that of its module.
    """

    def note(frame: FrameType, what: str, _: object) -> None:
        known = frame.f_code.co_qualname
        if what == event and name.endswith(known) and f".{frame.f_globals['__name__']}.{known}".endswith(f".{name}"):
            hear(frame.f_locals)

    with _profiled(note):
        yield


@contextmanager
def signal_at(name: str, nth: int, number: int = signal.SIGINT) -> Iterator[None]:
    """Inside the block, a signal comes at the nth call of this function."""
    calls = count(1)
    with heard(name, lambda _: signal.raise_signal(number) if next(calls) == nth else None):
        yield


@contextmanager
def _profiled(note: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    before = sys.getprofile()

    def both(frame: FrameType, event: str, called: Any) -> None:
        note(frame, event, called)
        if before is not None:
            before(frame, event, called)

    sys.setprofile(both)
    try:
        yield
    finally:
        sys.setprofile(before)
