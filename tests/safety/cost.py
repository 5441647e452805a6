"""What a call costs: seconds of a usual processor, and how much memory it needed at its peak."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

USUAL = 0.1  # seconds of the processor for `slowness`


@dataclass
class Cost:
    seconds: float = 0.0
    bytes: int = 0

    @property
    def megabytes(self) -> float:
        return self.bytes / 1e6


@cache
def slowness() -> float:
    """How many times as long as usual this machine takes for a fixed piece of Python, at least 1."""
    start = time.process_time()
    for _ in range(20):
        sorted(json.loads(json.dumps([str(number * 7919 % 10_007) for number in range(10_000)])))
    return max(1.0, (time.process_time() - start) / USUAL)


def memory(key: str) -> int:
    """VmRSS, or VmHWM: its peak since `forget`. 0 where there is no /proc."""
    if sys.platform != "linux":
        return 0
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


def forget() -> None:
    """Give free memory back to the system, so that what a call takes is seen, and start a new peak."""
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


@contextlib.contextmanager
def measured() -> Iterator[Cost]:
    """Measure a block: `with measured() as cost: ...`. The processor's time, because the machine may be busy, in
    seconds of a usual one, because it may be slow.
    """
    found, times = Cost(), slowness()
    forget()
    before, start = memory("VmRSS"), time.process_time()
    try:
        yield found
    finally:
        found.seconds, found.bytes = (time.process_time() - start) / times, memory("VmHWM") - before
