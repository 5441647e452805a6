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


def killed(work: Callable[[], object], whole: float, source: random.Random) -> bool:
    """Run `work`, and kill it with SIGKILL at a random moment of the `whole` seconds that it takes. Whether it had
    ended by then.
    """
    pid = forked(work)
    time.sleep(source.random() * whole * 1.2)
    done = ended(pid)
    if done is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return done == 0
