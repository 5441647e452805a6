"""Engines run programs. A program is a set of cells (configurations of one seed) that train side by side as replicas.

An engine has four methods: `free` says how many more programs it can take, `start` starts one, `ended` waits until some
have ended, and `close` ends the rest. The caller decides what to start and when, so that processes that share the work
claim no more than they can run.

On a CPU, each cell is a process with one thread, because two threads are slower than one on small matrix products. On a
GPU, several programs run at a time, each in a thread, because one alone leaves the GPU idle at times. `ray_engine.py`
has the engine for a cluster.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch

from evcl._core.errors import EvclError
from evcl._core.interrupts import deferred
from evcl.experiments.config import Config
from evcl.experiments.plugins import load_plugins
from evcl.experiments.result import Result
from evcl.experiments.run import REPLICAS, Event, OnEvents, execute_together
from evcl.training import Checkpoints, matmul_precision, streams

PROGRAMS_AT_A_TIME = 6  # on a GPU
GRACE_SECONDS = 60.0  # that processes have to save a checkpoint when they are stopped
RETRIES = 2  # of a program whose process died, perhaps for reasons outside the program
Outcome = list[Result] | Exception  # of a program: one result per cell, or the error
OnEvent = Callable[[int, Sequence[int], Event], None]  # program, which of its cells, their progress


class Died(EvclError):
    """The process that ran a program died, and did so again at each retry."""


class Engine(Protocol):
    """Runs programs, several at a time."""

    replicas: int  # at most this many cells per program

    def free(self) -> int:
        """How many more programs can be started now."""

    def start(self, number: int, cells: Sequence[Config], checkpoints: Checkpoints | None = None) -> None:
        """Start a program, identified by `number` from now on; with `checkpoints`, it saves its progress there."""

    def ended(self, timeout: float) -> list[tuple[int, Outcome]]:
        """The programs that have ended; waits for at least one, but no longer than `timeout` seconds."""

    def close(self) -> None:
        """Stop the programs that still run, after they have saved a checkpoint."""


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local(
    device: str, precision: str, on_event: OnEvent, workers: int | None = None, allow_divergence: bool = True
) -> Engine:
    """The engine for this machine: threads on a GPU, processes on a CPU. An Apple GPU runs one program at a time."""
    if device == "cuda":
        return Threads(precision, on_event, allow_divergence)
    if device == "mps":
        return Inline(on_event, allow_divergence)
    return Processes(workers or cores(), on_event, allow_divergence)


class Inline:
    """Runs programs in this process, one at a time, inside the call of `ended`."""

    replicas = 1

    def __init__(self, on_event: OnEvent, allow_divergence: bool = True) -> None:
        self.on_event, self.allow_divergence = on_event, allow_divergence
        self.waiting: list[tuple[int, Sequence[Config], Checkpoints | None]] = []

    def free(self) -> int:
        return 1 - len(self.waiting)

    def start(self, number: int, cells: Sequence[Config], checkpoints: Checkpoints | None = None) -> None:
        self.waiting.append((number, cells, checkpoints))

    def ended(self, timeout: float) -> list[tuple[int, Outcome]]:
        if not self.waiting:
            time.sleep(timeout)
            return []
        number, cells, checkpoints = self.waiting.pop()
        try:
            return [(number, self.run(cells, partial(self.on_event, number), checkpoints))]
        except Exception as error:
            return [(number, error)]

    def run(self, cells: Sequence[Config], on_event: OnEvents, checkpoints: Checkpoints | None) -> list[Result]:
        return execute_together(cells, on_event, self.allow_divergence, checkpoints=checkpoints)

    def close(self) -> None:
        self.waiting = []


# --- on a CPU: processes --------------------------------------------------------------------------------------------


def _end_with_parent() -> None:
    """End this process when its parent is killed, so that only the process that takes over writes the checkpoints."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _start_worker(pipe: Connection, allow_divergence: bool) -> BaseProcess:
    """A process that runs `_work`. Where it can be, it is the copy of a process that has imported this module already:
    importing torch takes seconds. On a Mac, a process may not go on after it is copied.
    """
    for kind in ("forkserver", "spawn") if sys.platform == "linux" else ("spawn",):
        context: Any = multiprocessing.get_context(kind)
        if kind == "forkserver":
            context.set_forkserver_preload([__name__])
        process: BaseProcess = context.Process(
            target=_work, args=(pipe, allow_divergence, dict(os.environ)), daemon=True
        )
        try:
            process.start()
        except ChildProcessError:  # this process was forked from one that has such a process: it is not ours to copy
            continue
        break
    pipe.close()  # so that the pipe closes when the process ends
    return process


def _work(pipe: Connection, allow_divergence: bool, environment: dict[str, str]) -> None:
    """The loop of a worker process: receive programs through the pipe, send back events and outcomes. SIGTERM ends it
    after the current program has saved a checkpoint (see `execute_together`).
    """
    os.environ.clear()
    os.environ.update(environment)  # as it is now: a copy has that of its original
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _end_with_parent()
    torch.set_num_threads(1)
    load_plugins()
    with contextlib.suppress(EOFError, OSError):
        while True:
            cells, checkpoints = pipe.recv()
            try:
                outcome: Outcome = execute_together(
                    cells, lambda some, event: pipe.send((some, event)), allow_divergence, checkpoints=checkpoints
                )
            except Exception as error:
                outcome = portable(error)
            pipe.send(outcome)


def portable(error: Exception) -> Exception:
    """An error that another process can unpickle, with its traceback as a note."""
    plain = all(isinstance(arg, str | int | None) for arg in error.args)
    if not plain or type(error).__module__ not in ("builtins", "evcl._core.errors"):
        error = RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
    error.add_note("".join(traceback.format_exception(error)))
    return error


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    number: int | None = None  # of the program it runs


class Processes:
    """A pool of processes that knows which program each one runs, so that a process that dies affects no other."""

    replicas = 1

    def __init__(self, workers: int, on_event: OnEvent, allow_divergence: bool = True) -> None:
        self.most, self.on_event, self.allow_divergence = workers, on_event, allow_divergence
        self.workers: list[_Worker] = []
        self.running: dict[int, tuple[Sequence[Config], Checkpoints | None]] = {}
        self.died: dict[int, int] = {}  # program -> how often its process died
        self._ended: list[tuple[int, Outcome]] = []

    def free(self) -> int:
        return self.most - len(self.running)

    def start(self, number: int, cells: Sequence[Config], checkpoints: Checkpoints | None = None) -> None:
        self.running[number] = cells, checkpoints
        idle = next((worker for worker in self.workers if worker.number is None), None)
        if idle is None:
            ours, theirs = multiprocessing.Pipe()
            idle = _Worker(_start_worker(theirs, self.allow_divergence), ours)
            self.workers.append(idle)
        idle.number = number
        try:
            idle.pipe.send((list(cells), checkpoints))
        except OSError:
            self._bury(idle)

    def ended(self, timeout: float) -> list[tuple[int, Outcome]]:
        busy = [worker for worker in self.workers if worker.number is not None]
        if not busy and not self._ended:
            time.sleep(timeout)
        some = wait_for([worker.pipe for worker in busy], 0 if self._ended else timeout) if busy else []
        for worker in (worker for worker in busy if worker.pipe in some):
            assert worker.number is not None
            try:
                came = worker.pipe.recv()
            except (EOFError, OSError):
                self._bury(worker)
                continue
            if isinstance(came, tuple):
                self.on_event(worker.number, *came)
                continue
            self._ended.append((worker.number, came))
            self.running.pop(worker.number)
            worker.number = None
        outcomes, self._ended = self._ended, []
        return outcomes

    def _bury(self, worker: _Worker) -> None:
        """Handle a dead worker: run its program again, or give it up after too many deaths."""
        self.workers.remove(worker)
        worker.pipe.close()
        worker.process.join()
        number = worker.number
        assert number is not None
        cells, checkpoints = self.running.pop(number)
        self.died[number] = self.died.get(number, 0) + 1
        if self.died[number] <= RETRIES:
            self.start(number, cells, checkpoints and replace(checkpoints, resume=True))
            return
        code = worker.process.exitcode or 0
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        self._ended.append((number, Died(f"its process ended {how}, {RETRIES + 1} times; too little memory?")))

    def close(self) -> None:
        """Stop the workers. They have `GRACE_SECONDS` to save checkpoints, unless Ctrl-C is pressed again."""
        workers, self.workers = self.workers, []
        end = time.monotonic() + GRACE_SECONDS
        try:
            with deferred(again=True):
                for worker in workers:
                    worker.process.terminate()
                for worker in workers:
                    while worker.process.is_alive() and time.monotonic() < end:
                        self._hear(worker)  # otherwise a full pipe would block it
        finally:
            for worker in workers:
                worker.process.kill()
                worker.process.join()
                self._hear(worker)
                worker.pipe.close()

    def _hear(self, worker: _Worker) -> None:
        """Pass on the last events of a worker that is stopping, such as that it could not save a checkpoint."""
        with contextlib.suppress(EOFError, OSError):
            while worker.pipe.poll(0.05):
                came = worker.pipe.recv()
                if isinstance(came, tuple) and worker.number is not None:
                    self.on_event(worker.number, *came)
        worker.process.join(0.05)


# --- on a GPU: threads ----------------------------------------------------------------------------------------------


class Threads:
    """Runs several programs at a time on one GPU, in threads of this process."""

    replicas = REPLICAS

    def __init__(self, precision: str, on_event: OnEvent, allow_divergence: bool = True) -> None:
        self.on_event, self.allow_divergence = on_event, allow_divergence
        self.events: queue.Queue[tuple[int, Sequence[int], Event]] = queue.Queue()
        self.stopped = threading.Event()
        self.pending: dict[Future[list[Result]], int] = {}
        self.stack = ExitStack()
        self.stack.enter_context(matmul_precision(precision))  # a setting of the whole process in torch
        self.pool = self.stack.enter_context(ThreadPoolExecutor(PROGRAMS_AT_A_TIME))
        self.stack.callback(lambda: self.pool.shutdown(wait=False, cancel_futures=True))
        self.stack.callback(self.stopped.set)

    def free(self) -> int:
        return PROGRAMS_AT_A_TIME - len(self.pending)

    def start(self, number: int, cells: Sequence[Config], checkpoints: Checkpoints | None = None) -> None:
        own = checkpoints and replace(checkpoints, stop=self.stopped.is_set)

        def tell(some: Sequence[int], event: Event) -> None:
            if self.stopped.is_set() and own is None:
                raise RuntimeError("stopped")
            self.events.put((number, some, event))

        def train() -> list[Result]:
            with torch.cuda.stream(streams().run):
                return execute_together(cells, tell, self.allow_divergence, checkpoints=own)

        self.pending[self.pool.submit(train)] = number

    def ended(self, timeout: float) -> list[tuple[int, Outcome]]:
        if not self.pending:
            time.sleep(timeout)
        done, _ = wait(self.pending, timeout=min(timeout, 0.1), return_when=FIRST_COMPLETED)
        try:
            while True:
                self.on_event(*self.events.get_nowait())
        except queue.Empty:
            pass
        outcomes: list[tuple[int, Outcome]] = []
        for future in done:
            error = future.exception()
            if isinstance(error, torch.AcceleratorError):  # the GPU is unusable in this process from now on
                raise EvclError(f"the GPU can no longer be used: {error}") from error
            if error is not None and not isinstance(error, Exception):
                raise error
            outcomes.append((self.pending.pop(future), error or future.result()))
        return outcomes

    def close(self) -> None:
        self.stack.close()
