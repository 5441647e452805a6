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


class Killer:
    """Kills work with SIGKILL at random moments of the seconds that it takes, which are measured."""

    def __init__(self, work: Callable[[], object], seed: int) -> None:
        """`work` is done once, and not killed."""
        self.source, self.kills = random.Random(seed), 0
        started = time.monotonic()
        assert waited(forked(work)) == 0
        self.whole = time.monotonic() - started

    def kill(self, work: Callable[[], object]) -> bool:
        """Run `work`; whether it had ended before it could be killed, which does not count as a kill."""
        pid = forked(work)
        time.sleep(self.source.random() * self.whole)
        done = ended(pid)
        if done is not None:
            assert done == 0
            self.whole *= 0.9  # the machine is less busy
            return True
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        self.kills += 1
        return False
