"""Two processes that train together, as if torchrun had started them."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from typing import Any


def _member(environment: dict[str, str], main: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    main(*arguments)


def in_two(main: Callable[..., None], *arguments: Any) -> None:
    """Call `main`, of a module, in both, and wait. Where it can be, they are copies of a process that has imported
    evcl: importing torch takes seconds.
    """
    context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload(["evcl.experiments.engines"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    both = [
        context.Process(target=_member, args=({**group, "RANK": rank, "LOCAL_RANK": rank}, main, arguments))
        for rank in ("0", "1")
    ]
    for process in both:
        process.start()
    for process in both:
        process.join(300)
        process.kill()  # which does nothing to one that has ended
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
