"""Several runs at once.

On a CPU: a process a seed, one thread each, since two threads inside one small product are slower than one. On a GPU:
runs of one shape share a program, and a few programs run at a time, each in a thread: one alone leaves gaps.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.managers import SyncManager
from typing import Any

import torch

from evcl.errors import EvclError
from evcl.experiments.plugins import load_plugins
from evcl.experiments.run import Config, Event, execute, execute_together, merge, programs
from evcl.interrupts import deferred
from evcl.training import Checkpoints, Stopped, matmul_precision, streams

REPLICAS, PROGRAMS = 100, 6  # on a GPU: of one program, and programs at a time
GRACE = 60.0  # seconds that processes have to save themselves
OnEvent = Callable[[int, Event], None]
Result = dict[str, Any]


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def execute_all(
    configs: Sequence[Config],
    on_event: OnEvent,
    workers: int | None = None,
    tolerant: bool = False,
    checkpoints: Sequence[Checkpoints] | None = None,
) -> Iterator[tuple[int, Result]]:
    """(index, result) of each configuration as it ends; `on_event(index, event)` hears of all of them.

    A run whose loss is lost ends all of them or, if `tolerant`, has no accuracy. `checkpoints` are each one's own; on a
    GPU, where configurations share a program, it saves itself with the first of them.
    """
    parts: dict[tuple[str, str], list[int]] = {}
    for i, config in enumerate(configs):
        parts.setdefault((config.device, config.precision), []).append(i)
    for (device, precision), members in parts.items():
        some = [configs[i] for i in members]
        own = None if checkpoints is None else [checkpoints[i] for i in members]

        def heard(i: int, event: Event, members: list[int] = members) -> None:
            on_event(members[i], event)

        if device == "cuda":
            with matmul_precision(precision):  # torch keeps one for the whole process
                yield from ((members[i], result) for i, result in _on_gpu(some, heard, tolerant, own))
        else:
            yield from ((members[i], result) for i, result in _on_cpu(some, heard, workers, tolerant, own))


# --- on a CPU: processes -------------------------------------------------------------------------------------------

_events: Any = None
_working = False


def _start(events: Any) -> None:
    global _events  # noqa: PLW0603  (a worker's own)
    _events = events
    _end_with_parent()
    torch.set_num_threads(1)
    load_plugins()
    signal.signal(signal.SIGTERM, _terminated)


def _terminated(*_: object) -> None:
    """Ends the work alone, so that the pool is not broken: it would terminate the others, which may be saving."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if _working:
        sys.exit(1)
    os._exit(1)


def _serve() -> None:
    """The process of the events: a SIGTERM to all of them does not end it before those that have something to say."""
    _end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _end_with_parent() -> None:
    """A parent that is killed takes this process with it: a run that is gone on with has its checkpoints to itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its workers
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _work(index: int, config: Config, tolerant: bool, checkpoints: Checkpoints | None) -> Result:
    global _working  # noqa: PLW0603  (a worker's own)
    _working = True
    try:
        return execute(config, lambda event: _events.put((index, event)), tolerant, checkpoints)
    except SystemExit:  # it was terminated, and has saved itself if it could
        raise Stopped from None
    finally:
        _working = False


def _on_cpu(
    configs: Sequence[Config],
    on_event: OnEvent,
    workers: int | None,
    tolerant: bool,
    checkpoints: Sequence[Checkpoints] | None,
) -> Iterator[tuple[int, Result]]:
    """Every seed by itself."""
    seeds = [(i, k, replace(c, seeds=(seed,))) for i, c in enumerate(configs) for k, seed in enumerate(c.seeds)]
    parts = [[0.0] * len(config.seeds) for config in configs]
    ended: list[dict[int, Result]] = [{} for _ in configs]

    def heard(index: int, event: Event) -> None:
        i, k, _ = seeds[index]
        parts[i][k] = event.done
        on_event(i, replace(event, done=sum(parts[i]) / len(parts[i])))

    own = [None] * len(configs) if checkpoints is None else checkpoints
    if len(seeds) == 1:
        yield 0, execute(configs[0], lambda event: on_event(0, event), tolerant, own[0])
        return
    context = multiprocessing.get_context("spawn")
    manager = SyncManager(ctx=context)
    manager.start(_serve)
    with manager:
        events = manager.Queue()
        with ProcessPoolExecutor(min(workers or cores(), len(seeds)), context, _start, (events,)) as pool:
            try:
                pending = {
                    pool.submit(_work, index, config, tolerant, own[i]): index
                    for index, (i, _, config) in enumerate(seeds)
                }
                for index, result in _as_they_end(pending, events, heard):
                    i, k, _ = seeds[index]
                    ended[i][k] = result
                    if len(ended[i]) == len(configs[i].seeds):
                        yield i, merge([found for _, found in sorted(ended[i].items())])
            except BaseException as error:
                _end(pool)
                with contextlib.suppress(Exception):  # what they had to say on the way out
                    _drain(events, heard)
                if isinstance(error, BrokenProcessPool):
                    more = "" if checkpoints is None else "; --resume goes on from the last checkpoints"
                    raise EvclError(f"one of the run's processes was killed, or ran out of memory{more}") from error
                raise


def _end(pool: ProcessPoolExecutor) -> None:
    """End the processes of a pool; those that save themselves may take their time, unless Ctrl-C is pressed again."""
    processes = list((pool._processes or {}).values())  # shutdown forgets them
    pool.shutdown(wait=False, cancel_futures=True)
    end = time.monotonic() + GRACE
    try:
        with deferred(again=True):
            for process in processes:
                process.terminate()
            for process in processes:
                process.join(max(0.0, end - time.monotonic()))
    finally:
        for process in processes:
            with contextlib.suppress(OSError):
                process.kill()


# --- on a GPU: threads ---------------------------------------------------------------------------------------------


def _on_gpu(
    configs: Sequence[Config], on_event: OnEvent, tolerant: bool, checkpoints: Sequence[Checkpoints] | None
) -> Iterator[tuple[int, Result]]:
    groups = programs(configs, REPLICAS)
    events: queue.Queue[tuple[int, Event]] = queue.Queue()
    stopped = threading.Event()

    def work(group: Sequence[int]) -> list[Result]:
        def tell(i: int, event: Event) -> None:
            if stopped.is_set() and checkpoints is None:
                raise RuntimeError("stopped")
            events.put((group[i], event))

        own = None if checkpoints is None else replace(checkpoints[group[0]], stop=stopped.is_set)
        with torch.cuda.stream(streams().run):
            return execute_together([configs[i] for i in group], tell, tolerant, own)

    with ThreadPoolExecutor(PROGRAMS) as pool, ExitStack() as stack:
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        stack.callback(stopped.set)
        pending = {pool.submit(work, group): group for group in groups}
        for group, results in _as_they_end(pending, events, on_event):
            yield from zip(group, results, strict=True)


def _as_they_end(pending: dict[Future[Any], Any], events: Any, on_event: OnEvent) -> Iterator[tuple[Any, Any]]:
    """(what a future stands for, its result), with the events on the way."""
    while pending:
        done, _ = wait(pending, timeout=0.1, return_when=FIRST_COMPLETED)
        _drain(events, on_event)
        for future in done:
            yield pending.pop(future), future.result()


def _drain(events: Any, on_event: OnEvent) -> None:
    try:
        while True:
            on_event(*events.get_nowait())
    except queue.Empty:
        return
