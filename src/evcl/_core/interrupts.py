"""Ctrl-C and SIGTERM, put off until what is at work has saved itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM in a command, with what there is to say of it. Not a KeyboardInterrupt, which typer answers in
    its own way.
    """


@contextmanager
def deferred(again: bool = False) -> Iterator[Callable[[], bool]]:
    """SIGINT and SIGTERM do nothing in here but make the function that this yields true; they come at the end of it.

    A second SIGINT comes at once: whoever presses Ctrl-C twice does not want to wait. So does the first, if something
    was interrupted already: `again`. Signals reach the main thread only; elsewhere, and where they are ignored, nothing
    changes.
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
            if signal.getsignal(number) not in (None, signal.SIG_IGN):  # None: it was not set by Python
                before[number] = signal.signal(number, hear)
    try:
        yield lambda: bool(heard)
    finally:
        restore()
        if heard:
            signal.raise_signal(heard[0])
