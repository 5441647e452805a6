"""Run several configurations at once, each seed as its own cell, and merge the results of a configuration's seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from evcl._core.errors import EvclError
from evcl._core.ranks import Ranks
from evcl.experiments.cells import MakeEngine, work
from evcl.experiments.config import Config
from evcl.experiments.engines import Inline, local
from evcl.experiments.result import Result, merge
from evcl.experiments.run import Event, execute
from evcl.experiments.store import Failure, NullStore, Store
from evcl.training import Checkpoints

OnEvent = Callable[[int, Event], None]


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
    its seeds side by side. Without a store, a single configuration can save its progress in `checkpoints`.
    """
    if checkpoints is not None and len(configs) > 1:
        raise ValueError("checkpoints work with one configuration only")
    if ranks is not None:
        for i, config in enumerate(configs):
            yield i, execute(config, partial(on_event, i), allow_divergence, ranks, checkpoints)
        return
    parts: dict[tuple[str, str], list[int]] = {}
    for i, config in enumerate(configs):
        parts.setdefault((config.device, config.precision), []).append(i)
    failed: list[str] = []
    for (device, precision), members in parts.items():
        cells = [(i, cell) for i in members for cell in configs[i].cells]
        alone = device == "cpu" and len(cells) == 1
        here = (
            partial(Inline, allow_divergence=allow_divergence)
            if alone
            else partial(local, device, precision, workers=workers, allow_divergence=allow_divergence)
        )
        yield from _gathered(
            configs, cells, on_event, engine or here, store or NullStore(checkpoints), allow_divergence, failed
        )
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
    parts: dict[int, dict[int, float]] = {i: dict.fromkeys(configs[i].seeds, 0.0) for i, _ in cells}
    ended: dict[int, dict[int, Result]] = {i: {} for i in parts}

    def heard(some: Sequence[int], event: Event) -> None:
        for c in some:
            i, cell = cells[c]
            parts[i][cell.seed] = event.done
        for i in dict.fromkeys(cells[c][0] for c in some):
            on_event(i, replace(event, done=sum(parts[i].values()) / len(parts[i])))

    for c, outcome in work(
        [cell for _, cell in cells], store, engine, heard, retry_failed=True, allow_divergence=allow_divergence
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
