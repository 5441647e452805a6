"""What a call costs: seconds of the processor, and how much memory it needed at its peak."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Cost:
    seconds: float = 0.0
    bytes: int = 0

    @property
    def megabytes(self) -> float:
        return self.bytes / 1e6


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
    """Measure a block: `with measured() as cost: ...`. The processor's time, because the machine may be busy."""
    found = Cost()
    forget()
    before, start = memory("VmRSS"), time.process_time()
    try:
        yield found
    finally:
        found.seconds, found.bytes = time.process_time() - start, memory("VmHWM") - before
