"""Run configurations, each seed as its own cell, and merge the results of a configuration's seeds."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from evcl._core.errors import EvclError
from evcl._core.ranks import Ranks
from evcl.experiments.config import Config
from evcl.experiments.result import Result, merge
from evcl.experiments.run import REPLICAS, Event, execute, execute_together
from evcl.training import Checkpoints

if TYPE_CHECKING:
    from evcl.experiments.cells import MakeEngine
    from evcl.experiments.store import Store

OnEvent = Callable[[int, Event], None]


class Seeds:
    """The progress of a configuration whose seeds train apart: events of single seeds become events of all."""

    def __init__(self, config: Config, on_event: Callable[[Event], object]) -> None:
        self.on_event = on_event
        self.done = dict.fromkeys(config.seeds, 0.0)

    def __call__(self, event: Event) -> None:
        self.done |= dict.fromkeys(event.seeds, event.done)
        self.on_event(replace(event, done=sum(self.done.values()) / len(self.done)))


def execute_seeds(
    config: Config,
    on_event: Callable[[Event], object],
    allow_divergence: bool = False,
    workers: int | None = None,
    ranks: Ranks | None = None,
    checkpoints: Checkpoints | None = None,
) -> Result:
    """Run a configuration on this machine: on a CPU each of several seeds in a process of its own, at most `workers` at
    a time; on a GPU side by side. With `ranks`, several processes train all seeds side by side.
    """
    if ranks is not None:
        return execute(config, on_event, allow_divergence, ranks, checkpoints)
    if config.device == "cpu" and len(config.seeds) > 1:
        return _in_processes(config, Seeds(config, on_event), allow_divergence, workers, checkpoints)
    heard, size, found = Seeds(config, on_event), REPLICAS if config.device == "cuda" else 1, list[Result]()
    for first in range(0, len(config.seeds), size):
        cells = config.cells[first : first + size]
        found += execute_together(cells, lambda _, event: heard(event), allow_divergence, checkpoints=checkpoints)
    return merge(found)


def _in_processes(
    config: Config, heard: Seeds, allow_divergence: bool, workers: int | None, checkpoints: Checkpoints | None
) -> Result:
    from evcl.experiments.engines import Processes, cores

    todo, found = deque(enumerate(config.cells)), dict[int, Result]()
    engine = Processes(workers or cores(), lambda i, some, event: heard(event), allow_divergence)
    try:
        while len(found) < len(config.seeds):
            while todo and engine.free():
                i, cell = todo.popleft()
                engine.start(i, [cell], checkpoints)
            for i, outcome in engine.ended(30.0):
                if isinstance(outcome, Exception):
                    raise outcome
                (found[i],) = outcome
    finally:
        engine.close()
    return merge([found[i] for i in range(len(found))])


def execute_all(
    configs: Sequence[Config],
    on_event: OnEvent,
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
    from evcl.experiments.engines import local
    from evcl.experiments.store import Store

    parts: dict[tuple[str, str], list[int]] = {}
    for i, config in enumerate(configs):
        parts.setdefault((config.device, config.precision), []).append(i)
    failed: list[str] = []
    with contextlib.ExitStack() as stack:
        if store is None:
            store = Store(Path(stack.enter_context(TemporaryDirectory(prefix="evcl-"))))
        for (device, precision), members in parts.items():
            cells = [(i, cell) for i in members for cell in configs[i].cells]
            here = engine or partial(local, device, precision, workers=workers, allow_divergence=allow_divergence)
            yield from _gathered(configs, cells, on_event, here, store, allow_divergence, failed)
    if failed:
        raise EvclError(f"{len(failed)} failed, the first: {failed[0]}")


def _gathered(
    configs: Sequence[Config],
    cells: Sequence[tuple[int, Config]],
    on_event: OnEvent,
    engine: MakeEngine,
    store: Store,
    allow_divergence: bool,
    failed: list[str],
) -> Iterator[tuple[int, Result]]:
    """Yield the merged result of each configuration when all its seeds have ended; `cells` must hold all of them."""
    from evcl.experiments.cells import work
    from evcl.experiments.store import Failure

    heard = {i: Seeds(configs[i], partial(on_event, i)) for i, _ in cells}
    ended: dict[int, dict[int, Result]] = {i: {} for i in heard}

    def hear(some: Sequence[int], event: Event) -> None:
        for i in dict.fromkeys(cells[c][0] for c in some):
            heard[i](event)

    for c, outcome in work(
        [cell for _, cell in cells], store, engine, hear, retry_failed=True, allow_divergence=allow_divergence
    ):
        i, cell = cells[c]
        if isinstance(outcome, Failure):
            if outcome.result is None:
                failed.append(f"{cell.name} seed {cell.seed}: {outcome.message}")
                continue
            outcome = outcome.result  # it diverged
        ended[i][cell.seed] = outcome
        if len(ended[i]) == len(configs[i].seeds):
            yield i, merge([ended[i][seed] for seed in configs[i].seeds])
