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
    """(index, result) of each configuration as it ends; `on_event(index, event)` hears of all of them.

    A run that fails ends all of them. With `allow_divergence` it is reported when the others have ended, and a run that
    diverged has no accuracy. A `store` keeps the seeds that are done; what failed before is tried again. The engine is
    this machine if none is given. Several processes (`ranks`) train one configuration after the other, its seeds side
    by side. Without a store the seeds of one configuration may save themselves in `checkpoints`.
    """
    if checkpoints is not None and len(configs) > 1:
        raise ValueError("checkpoints are those of one configuration")
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
    """The results of configurations, all of whose seeds are among the cells."""
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
