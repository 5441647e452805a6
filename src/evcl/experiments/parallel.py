"""Several runs at once.

On a CPU: a process a run, one thread each, since two threads inside one small product are slower than one. On a GPU:
one after another.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from functools import partial
from typing import Any

import torch

from evcl.experiments.plugins import load_plugins
from evcl.experiments.run import Config, Event, execute

_events: Any = None


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(events: Any) -> None:
    global _events  # noqa: PLW0603  (a worker's own)
    _events = events
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its workers
    torch.set_num_threads(1)
    load_plugins()


def _work(index: int, config: Config) -> dict[str, Any]:
    return execute(config, lambda event: _events.put((index, event)))


def execute_all(
    configs: Sequence[Config], on_event: Callable[[int, Event], None], workers: int | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(index, result) of each configuration as it ends; `on_event(index, event)` hears of all of them."""
    if any(config.device == "cuda" for config in configs):  # one GPU: one after another, each with all its seeds
        for index, config in enumerate(configs):
            yield index, execute(config, partial(on_event, index))
        return
    workers = min(workers or cores(), len(configs))
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        events = manager.Queue()
        with ProcessPoolExecutor(workers, context, _start, (events,)) as pool:
            pending = {pool.submit(_work, i, config): i for i, config in enumerate(configs)}
            try:
                while pending:
                    done, _ = wait(pending, timeout=0.1, return_when=FIRST_COMPLETED)
                    _drain(events, on_event)
                    for future in done:
                        yield pending.pop(future), future.result()
            except BaseException:
                processes = list(pool._processes.values())  # shutdown forgets them
                pool.shutdown(wait=False, cancel_futures=True)
                for process in processes:
                    process.terminate()
                raise


def _drain(events: Any, on_event: Callable[[int, Event], None]) -> None:
    try:
        while True:
            on_event(*events.get_nowait())
    except queue.Empty:
        return
