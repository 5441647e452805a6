"""Processes that are killed: forked from this one, which has imported everything, so that each takes milliseconds."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable


def forked(work: Callable[[], object]) -> int:
    """Run `work` in a child process; returns its pid. The child ends with 0, or 1 if it raised."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        work()
        status = 0
    except BaseException:
        if os.environ.get("EVCL_SHOW_CHILDREN"):
            traceback.print_exc()
    finally:
        os._exit(status)


def ended(pid: int) -> int | None:
    """The status of a child that has ended: 0, 1, or minus the signal; None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def waited(pid: int, seconds: float = 120.0) -> int:
    end = time.monotonic() + seconds
    while (status := ended(pid)) is None:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise TimeoutError(f"a child ran for more than {seconds:g} s")
        time.sleep(0.002)
    return status


class Calls:
    """Counts the calls that this process makes, of Python and C functions. It dies of SIGKILL at call `fatal`, or when
    it calls a C function of this name.
    """

    def __init__(self, fatal: int | str | None = None) -> None:
        self.count, self.fatal = 0, fatal

    def __enter__(self) -> Calls:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, _frame: object, event: str, called: object) -> None:
        if event in ("call", "c_call"):
            self.count += 1
            if self.fatal in (self.count, getattr(called, "__name__", "")):
                os.kill(os.getpid(), signal.SIGKILL)


def calls(work: Callable[[], object]) -> int:
    """How many calls `work` makes, done once in a child process."""
    reader, writer = os.pipe()

    def count() -> None:
        with Calls() as counting:
            work()
        os.write(writer, str(counting.count).encode())

    status = waited(forked(count), 600)
    os.close(writer)
    with os.fdopen(reader) as said:
        text = said.read()
    assert status == 0
    return int(text)


class Killer:
    """Kills work with SIGKILL at a random one of its calls: the same ones on any machine, however busy."""

    def __init__(self, work: Callable[[], object], seed: int) -> None:
        """`work` is done once, and not killed."""
        self.source, self.kills, self.whole = random.Random(seed), 0, calls(work)

    def kill(self, work: Callable[[], object]) -> bool:
        """Run `work`; whether it ended before the call at which it was to die, which does not count as a kill."""
        fatal = self.source.randrange(1, self.whole + 1)

        def dying() -> None:
            with Calls(fatal):
                work()

        status = waited(forked(dying), 600)
        assert status in (0, -signal.SIGKILL)
        self.kills += status != 0
        return status == 0
