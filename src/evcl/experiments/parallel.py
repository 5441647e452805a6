"""Several runs at once: every seed a cell of its own, or a replica beside others, and the seeds' results as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from evcl._core.errors import EvclError
from evcl._core.ranks import Ranks
from evcl.experiments.cells import MakeEngine, work
from evcl.experiments.engines import Inline, local
from evcl.experiments.result import Result, merge
from evcl.experiments.run import Config, Event, execute
from evcl.experiments.store import Failure, Store, Unkept
from evcl.training import Checkpoints

OnEvent = Callable[[int, Event], None]


def execute_all(
    configs: Sequence[Config],
    on_event: OnEvent,
    workers: int | None = None,
    tolerant: bool = False,
    store: Store | None = None,
    engine: MakeEngine | None = None,
    ranks: Ranks | None = None,
    checkpoints: Checkpoints | None = None,
) -> Iterator[tuple[int, Result]]:
    """(index, result) of each configuration as it ends; `on_event(index, event)` hears of all of them.

    A run that fails ends all of them or, if `tolerant`, is told of when the others have ended; one that diverged
    then has no accuracy. With a `store`, seeds that are done are found there and kept there, and what failed before is
    tried again. The engine is this machine if nothing is said. Several processes (`ranks`) train one configuration
    after the other, its seeds side by side. Without a store the seeds of one configuration may save themselves in
    `checkpoints`, which the caller removes.
    """
    if checkpoints is not None and len(configs) > 1:
        raise ValueError("checkpoints are those of one configuration")
    if ranks is not None:
        for i, config in enumerate(configs):
            yield i, execute(config, partial(on_event, i), tolerant, ranks, checkpoints)
        return
    parts: dict[tuple[str, str], list[int]] = {}
    for i, config in enumerate(configs):
        parts.setdefault((config.device, config.precision), []).append(i)
    failed: list[str] = []
    for (device, precision), members in parts.items():
        cells = [(i, cell) for i in members for cell in configs[i].cells]
        alone = device == "cpu" and len(cells) == 1
        here = (
            partial(Inline, tolerant=tolerant)
            if alone
            else partial(local, device, precision, workers=workers, tolerant=tolerant)
        )
        yield from _gathered(configs, cells, on_event, engine or here, store or Unkept(checkpoints), tolerant, failed)
    if failed:
        raise EvclError(f"{len(failed)} failed, the first: {failed[0]}")


def _gathered(
    configs: Sequence[Config],
    cells: Sequence[tuple[int, Config]],
    on_event: OnEvent,
    engine: MakeEngine,
    store: Store,
    tolerant: bool,
    failed: list[str],
) -> Iterator[tuple[int, Result]]:
    """The results of configurations, all of whose seeds are among the cells."""
    parts: dict[int, dict[int, float]] = {i: dict.fromkeys(configs[i].seeds, 0.0) for i, _ in cells}
    ended: dict[int, dict[int, Result]] = {i: {} for i in parts}

    def heard(some: Sequence[int], event: Event) -> None:
        for c in some:
            i, cell = cells[c]
            parts[i][cell.seed] = event.done
        for i in dict.fromkeys(cells[c][0] for c in some):
            on_event(i, replace(event, done=sum(parts[i].values()) / len(parts[i])))

    for c, outcome in work([cell for _, cell in cells], store, engine, heard, retry_failed=True, tolerant=tolerant):
        i, cell = cells[c]
        if isinstance(outcome, Failure):
            if outcome.result is None:
                failed.append(f"{cell.name} seed {cell.seed}: {outcome.message}")
                continue
            outcome = outcome.result  # it diverged
        ended[i][cell.seed] = outcome
        if len(ended[i]) == len(configs[i].seeds):
            yield i, merge([ended[i][seed] for seed in configs[i].seeds])
