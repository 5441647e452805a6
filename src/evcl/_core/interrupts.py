"""Delay Ctrl-C and SIGTERM until the work in progress has been saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM in a command, with a message for the user. Typer would handle a KeyboardInterrupt itself."""


@contextmanager
def deferred(again: bool = False) -> Iterator[Callable[[], bool]]:
    """Hold back SIGINT and SIGTERM inside this context, and raise them at its end. It yields a function that returns
    True once a signal has arrived.

    A second SIGINT is raised at once, because a user who presses Ctrl-C twice does not want to wait. With `again`,
    which means that something was interrupted before, so is the first. Signals reach the main thread only; in other
    threads, and for signals that are ignored, nothing changes.
    """
    heard: list[int] = []
    before: dict[int, Any] = {}

    def hear(number: int, frame: object) -> None:
        impatient = number == signal.SIGINT and (again or number in heard)
        heard.append(number)
        if impatient:
            restore()
            signal.raise_signal(number)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) not in (None, signal.SIG_IGN):  # None: the handler was not set by Python
                before[number] = signal.signal(number, hear)
    try:
        yield lambda: bool(heard)
    finally:
        restore()
        if heard:
            signal.raise_signal(heard[0])
