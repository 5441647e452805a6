"""Run many cells: which of them train side by side, here or in other processes that share a store."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from evcl._core.errors import EvclError
from evcl._core.ranks import Ranks
from evcl._core.settings import Settings
from evcl.benchmarks import BENCHMARKS
from evcl.experiments import engines
from evcl.experiments.config import Config
from evcl.experiments.engines import Engine, OnEvent, Outcome
from evcl.experiments.folder import describe
from evcl.experiments.result import Result, merge
from evcl.experiments.run import Event, Seeds, execute_seeds
from evcl.experiments.store import Claim, Failure, Store, key
from evcl.training import Checkpoints

MakeEngine = Callable[[OnEvent], Engine]
"""A factory of engines. Its argument is the callback that receives the events of running cells."""
LOOKED_AT = 4096  # the cells of one program are chosen from this many
POLL, LONGEST = 1.0, 30.0  # shortest and longest seconds between checks on cells that other processes run


def work(
    cells: Sequence[Config],
    store: Store,
    engine: MakeEngine,
    on_event: Callable[[Sequence[int], Event], None] = lambda some, event: None,
    retry_failed: bool = False,
    allow_divergence: bool = True,
) -> Iterator[tuple[int, Result | Failure]]:
    """Yield (index, outcome) for every cell, whichever process runs it.

    `engine(on_event)` makes the engine. If a program of several cells fails, it is run again in halves, so that a cell
    fails only for its own reasons; without `allow_divergence`, the first failure ends all. With `retry_failed`, cells
    that failed before are tried once more. `on_event(indices, event)` is called with the cells that share an event.
    """
    with store:

        def heard(number: int, some: Sequence[int], event: Event) -> None:
            on_event([i for k in some for i in desk.places[desk.running[number][k].key]], event)

        at = engine(heard)
        try:
            desk = Scheduler(cells, store, retry_failed, at.replicas)
            while desk.unfinished:
                while at.free() > 0 and (number := desk.next()) is not None:
                    program = desk.configs(number)
                    at.start(number, program, store.checkpoints(program[0]))
                yield from desk.found()
                if desk.unfinished:
                    for number, outcome in at.ended(desk.pause()):
                        if isinstance(outcome, Exception) and not allow_divergence:
                            raise outcome
                        desk.record(number, outcome)
                    yield from desk.found()
        finally:
            at.close()


class Scheduler:
    """Keeps track of cells: which wait, which run here, and which have ended."""

    def __init__(self, cells: Sequence[Config], store: Store, retry_failed: bool, replicas: int) -> None:
        self.cells, self.store, self.replicas = cells, store, replicas
        self.places: dict[str, list[int]] = {}  # a cell requested twice is run once
        for i, cell in enumerate(cells):
            self.places.setdefault(key(cell), []).append(i)
        self.unfinished = set(self.places)
        self.waiting = deque(self.places)  # neither finished nor running here
        if store.others():
            self.waiting.rotate(-secrets.randbelow(len(self.waiting) or 1))  # processes start at different cells
        self.retry = {name for name in self.places if retry_failed and store.look(name).kind == "failed"}
        self.ready: deque[list[Claim]] = deque()
        self.running: dict[int, list[Claim]] = {}
        self.numbers = count()
        self._ended: list[tuple[str, Result | Failure]] = []
        self._next_look = 0.0

    def config(self, name: str) -> Config:
        return self.cells[self.places[name][0]]

    def configs(self, number: int) -> list[Config]:
        return [self.config(claim.key) for claim in self.running[number]]

    def next(self) -> int | None:
        """The number of a newly claimed program; None if none can be claimed now."""
        if not self.ready and time.monotonic() >= self._next_look:
            self._claim()
        if not self.ready:
            return None
        number = next(self.numbers)
        self.running[number] = self.ready.popleft()
        return number

    def _claim(self) -> None:
        """Claim the cells of one program. If other processes have claimed them all, wait before looking again, and
        longer if looking is slow, so that many waiting processes do not overload the file system.
        """
        begun, left = time.monotonic(), len(self.waiting)
        while left > 0:
            some = [self.waiting[i] for i in range(min(left, LOOKED_AT if self.replicas > 1 else 1))]
            group = {some[i] for i in bundle([self.config(name) for name in some], self.replicas)[0]}
            mine, theirs = [], []
            for _ in some:
                self.waiting.popleft()
            self.waiting.extendleft(name for name in reversed(some) if name not in group)
            for name in (name for name in some if name in group):
                took = self.store.take(self.config(name), name in self.retry)
                if isinstance(took, Claim):
                    self.retry.discard(name)
                    mine.append(took)
                elif took is None:
                    theirs.append(name)
                else:
                    self._ended.append((name, took))
            self.waiting.extend(theirs)
            left -= len(group)
            if mine:
                self._make_ready(mine)
                return
        taken = time.monotonic() - begun
        self._next_look = time.monotonic() + min(max(POLL, 10 * taken), LONGEST)

    def _make_ready(self, claims: Sequence[Claim]) -> None:
        for part in bundle([self.config(claim.key) for claim in claims], self.replicas):
            self.ready.append([claims[i] for i in part])

    def pause(self) -> float:
        """The longest time, in seconds, to wait for programs that run here."""
        if not self.waiting:
            return LONGEST
        return min(max(self._next_look - time.monotonic(), 0.01), LONGEST)

    def record(self, number: int, outcome: Outcome) -> None:
        """Record the outcome of a program: store its results or failures, or split it to run again."""
        claims = self.running.pop(number)
        if isinstance(outcome, Exception):
            if len(claims) > 1:
                half = len(claims) // 2
                self._make_ready(claims[:half])
                self._make_ready(claims[half:])
                return
            message = " ".join(str(outcome).split()) or type(outcome).__name__
            self._failed(claims[0], Failure(message))
            return
        for claim, result in zip(claims, outcome, strict=True):
            if result.diverged:
                self._failed(claim, Failure("diverged: the loss became NaN or infinite", result))
            elif self.store.complete(claim, result):
                self._ended.append((claim.key, result))
            else:  # this process was presumed dead, and another finished first
                self._ended.append((claim.key, self.store.result(self.config(claim.key))))

    def _failed(self, claim: Claim, failure: Failure) -> None:
        self.store.fail(claim, failure)
        self._ended.append((claim.key, failure))

    def found(self) -> Iterator[tuple[int, Result | Failure]]:
        """Yield the cells that have ended since the last call, here or elsewhere."""
        ended, self._ended = self._ended, []
        for name, outcome in ended:
            self.unfinished.discard(name)
            for i in self.places[name]:
                yield i, outcome


def bundle(cells: Sequence[Config], replicas: int) -> list[list[int]]:
    """The cells of each program, at most `replicas` of them: configurations of one shape with the same seeds.

    A program's cells are ordered by configuration, and within each configuration by the same order of seeds.
    """
    if replicas == 1:
        return [[i] for i in range(len(cells))]
    groups = _by_configuration(cells, replicas)
    configs = [replace(cells[group[0]], seeds=tuple(cells[i].seed for i in group)) for group in groups]
    return [[i for g in program for i in groups[g]] for program in programs(configs, replicas)]


def _by_configuration(cells: Sequence[Config], most: int) -> list[list[int]]:
    """Groups of cells that differ only in their seed, at most `most` per group."""
    groups: dict[tuple[str, str], list[list[int]]] = {}
    for i, cell in enumerate(cells):
        about = json.dumps(describe(replace(cell, seeds=())), sort_keys=True)
        same = groups.setdefault((cell.preset, about), [[]])
        if len(same[-1]) == most:
            same.append([])
        same[-1].append(i)
    return [group for same in groups.values() for group in same]


def programs(configs: Sequence[Config], replicas: int) -> list[list[int]]:
    """Groups of configurations that can share a program of at most `replicas` replicas: those that differ only in
    real-valued settings.
    """
    groups: list[tuple[object, list[int]]] = []
    for i, config in enumerate(configs):
        free = {name for name, value in config.settings.items() if isinstance(value, float) and name != "validation"}
        fixed = {name: None if name in free else value for name, value in config.settings.items()}
        key = (replace(config, settings=Settings({}), preset=""), fixed)
        alone = BENCHMARKS[config.benchmark].kind is not None  # it runs one configuration at a time
        for other, members in groups:
            if other == key and not alone and (len(members) + 1) * len(config.seeds) <= replicas:
                members.append(i)
                break
        else:
            groups.append((key, [i]))
    return [members for _, members in groups]


def execute_all(
    configs: Sequence[Config],
    on_event: Callable[[int, Event], None],
    workers: int | None = None,
    allow_divergence: bool = False,
    store: Store | None = None,
    engine: MakeEngine | None = None,
    ranks: Ranks | None = None,
    checkpoints: Checkpoints | None = None,
) -> Iterator[tuple[int, Result]]:
    """Yield (index, result) for each configuration as it ends; `on_event(index, event)` is called for all of them.

    If a run fails, all end. With `allow_divergence`, failures are raised only after the other runs have ended, and a
    run that diverged has no accuracy. A `store` keeps finished seeds; seeds that failed before are tried again. The
    default engine is this machine. With `ranks`, several processes together train one configuration after the other,
    its seeds side by side. A single configuration without a store can save its progress in `checkpoints`.
    """
    if checkpoints is not None and len(configs) > 1:
        raise ValueError("checkpoints work with one configuration only")
    if ranks is not None or (store is None and engine is None and len(configs) == 1):
        for i, config in enumerate(configs):
            yield i, execute_seeds(config, partial(on_event, i), allow_divergence, workers, ranks, checkpoints)
        return
    heard = [Seeds(config, partial(on_event, i)) for i, config in enumerate(configs)]
    ended: list[dict[int, Result]] = [{} for _ in configs]
    places: dict[tuple[str, str], list[tuple[int, Config]]] = {}
    for i, config in enumerate(configs):
        places.setdefault((config.device, config.precision), []).extend((i, cell) for cell in config.cells)
    failed: list[str] = []
    with contextlib.ExitStack() as stack:
        if store is None:
            store = Store(Path(stack.enter_context(TemporaryDirectory(prefix="evcl-"))))
        for (device, precision), members in places.items():

            def hear(some: Sequence[int], event: Event, members: list[tuple[int, Config]] = members) -> None:
                for i in dict.fromkeys(members[c][0] for c in some):
                    heard[i](event)

            local = partial(engines.local, device, precision, workers=workers, allow_divergence=allow_divergence)
            cells = [cell for _, cell in members]
            for c, outcome in work(cells, store, engine or local, hear, True, allow_divergence):
                i, cell = members[c]
                if isinstance(outcome, Failure):
                    if outcome.result is None:
                        failed.append(f"{cell.name} seed {cell.seed}: {outcome.message}")
                        continue
                    outcome = outcome.result  # it diverged
                ended[i][cell.seed] = outcome
                if len(ended[i]) == len(configs[i].seeds):
                    yield i, merge([ended[i][seed] for seed in configs[i].seeds])
    if failed:
        raise EvclError(f"{len(failed)} failed, the first: {failed[0]}")
