"""Compiles native.c once, with this machine's compiler. If that fails, everything works without it.

A compiled step is 10 to 20 % faster, and equal to the plain one up to rounding. EVCL_NATIVE=0 turns it off.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.files import cache_folder, write_atomically

C_SOURCE = Path(__file__).with_name("native.c")
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")


class Native:
    """The functions of native.c."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def bind(self, name: str, *arguments: Tensor | int | None) -> Callable[..., None]:
        """Bind a function to its tensors (contiguous, with the dtypes that it takes) and integers.

        Call the result with the real-valued arguments, which come first. Looking up a tensor's address takes as long as
        a small operation, so it is done once, here.
        """
        function = getattr(self._library, name)
        function.restype = None
        fixed = [
            ctypes.c_long(a) if isinstance(a, int) else ctypes.c_void_p(None if a is None else a.data_ptr())
            for a in arguments
        ]

        def call(*numbers: float, _alive: object = arguments) -> None:
            function(*map(ctypes.c_float, numbers), *fixed)

        return call


_lock = threading.Lock()


def native() -> Native | None:
    """The compiled functions, from the cache of an earlier run if possible; None if they cannot be compiled."""
    if os.environ.get("EVCL_NATIVE") == "0" or os.name != "posix":
        return None
    with _lock:  # only one thread compiles
        return _native(os.environ.get("CC", "cc"), cache_folder() / "native")


@cache
def _native(command: str, folder: Path) -> Native | None:
    words = shlex.split(command)
    compiler = shutil.which(words[0]) if words else None
    if compiler is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
            return None  # other users could put their code there
        path = folder / f"{_key([compiler, *words[1:]])}.so"
        digest = path.with_suffix(".sha256")
        if not path.exists() or not digest.exists() or digest.read_text() != _digest(path):
            _compile([compiler, *words[1:]], path)
            write_atomically(digest, lambda temporary: temporary.write_text(_digest(path)))
        return Native(path)
    except (OSError, EvclError, subprocess.SubprocessError, AttributeError):
        return None


def _compile(compiler: Sequence[str], path: Path) -> None:
    """Compile for exactly this processor, if the compiler supports it."""

    def build(out: Path) -> None:
        for flags in (("-march=native", *FLAGS), FLAGS):
            command = [*compiler, *flags, "-o", str(out), "-x", "c", str(C_SOURCE), "-lm"]
            done = subprocess.run(command, check=False, capture_output=True, timeout=60)
            if done.returncode == 0:
                return
        done.check_returncode()

    write_atomically(path, build)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _key(compiler: Sequence[str]) -> str:
    """A key of everything the result depends on: machines with different processors may share a home folder."""
    cpu, stat = Path("/proc/cpuinfo"), Path(compiler[0]).stat()
    lines = cpu.read_text().splitlines() if cpu.exists() else [f"model name {platform.processor()} {platform.node()}"]
    of_cpu = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    known = (C_SOURCE.read_text(), list(compiler), stat.st_size, stat.st_mtime_ns, FLAGS, platform.machine(), of_cpu)
    return hashlib.sha256(repr(known).encode()).hexdigest()[:16]
