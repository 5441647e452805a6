"""Save a program while it learns a stream, and resume it later with bit-identical results.

The state between two steps is: the run before this round (a round either succeeds or leaves the run unchanged), the
results of the round's earlier fits, every buffer of the step, and a `Position`. Batches, random draws of a method and
draws for predictions are functions of (seed, round, epoch), so they are generated again and not saved. The evaluation
of a finished round is repeated too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from evcl._core.ranks import Ranks
from evcl.training.checkpoint import Checkpoints, Identity, Saved, Stopped, Writer
from evcl.training.observer import Observer, Position
from evcl.training.run import Run
from evcl.training.step import Step

MOST_STAGES = 10_000  # fits of one round


class Checkpointer(Observer):
    """Saves a run round by round and, within a round, fit by fit. See `Writer`.

    With several processes (`ranks`), the first one writes and all of them read.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        identity: Identity,
        environment: Mapping[str, Any],
        tell: Callable[[str], object] = lambda note: None,
        ranks: Ranks | None = None,
    ) -> None:
        self.file = Writer(checkpoints, identity, environment, tell, writes=ranks is None or ranks.rank == 0)
        self.ranks = ranks
        self._round = 0
        self._heads: tuple[Sequence[int], Sequence[int]] = (), ()
        self._run: Run
        self._extra: Mapping[str, Tensor] = {}
        self._domains: list[int] = []
        self._tensors: dict[str, Tensor] = {}  # the run's at the start of the round or, if it is learned, at its end
        self._outline: Any = None  # of its memory then
        self._learned = False
        self._fits: dict[int, dict[str, Tensor]] = {}  # results of the round's finished fits
        self._fit: tuple[int, Step, Tensor] | None = None  # the fit in progress
        self._position: Position | None = None  # where to save it

    @property
    def seconds(self) -> float:
        return self.file.seconds

    # --- rounds -----------------------------------------------------------------------------------------------------

    def first(self, rounds: int) -> int:
        """The round to resume; all rounds before it are learned and evaluated."""
        return 0 if self.file.saved is None else self.file.saved.whole("round", rounds)

    def domains(self, tasks: int) -> list[int]:
        """The domains of the tasks that have begun, which are this many; empty if there is nothing to resume."""
        saved = self.file.saved
        if saved is None:
            return []
        domains = saved.description.get("domains") or [0] * tasks
        right = isinstance(domains, list) and len(domains) == tasks and all(type(d) is int for d in domains)
        if not right or not all(0 <= d <= max([-1, *domains[:i]]) + 1 for i, d in enumerate(domains)):
            raise saved.unfit("domains")
        return domains

    def enter(
        self,
        number: int,
        run: Run,
        seen: Sequence[int],
        own: Sequence[int],
        extra: Mapping[str, Tensor] | None = None,
        domains: Sequence[int] = (),
    ) -> bool:
        """Begin a round. If it is the one to resume, restore the run and the `extra` tensors.

        `seen` are the heads of the tasks before this round, and `own` those of its tasks. `domains` are those of the
        tasks so far. Returns True if the round is already learned.
        """
        self._round, self._run, self._extra, self._fits = number, run, extra or {}, {}
        self._heads, self._domains, self._learned = (seen, own), list(domains), False
        if self.file.saved is not None:
            self.load(self.file.saved)
        self._tensors, self._outline = run.tensors(), run.outline()
        return self._learned

    def learned(self) -> None:
        """Called when the round is learned and only its evaluation remains."""
        self.file.saved = self._fit = None
        self._fits, self._learned = {}, True
        self._tensors, self._outline = self._run.tensors(), self._run.outline()
        self.file.write(self)
        self.pause()

    def pause(self) -> None:
        """End here if asked to; a resumed run repeats the work since the last checkpoint."""
        if self.stopping():
            raise Stopped

    def stopping(self) -> bool:
        """Whether to end. Either all processes call this or none; they all follow the first one's answer."""
        stop = self.file.stopping()
        return stop if self.ranks is None else self.ranks.first(stop, self._run.network.posterior.mean.device)

    # --- fits: Observer ---------------------------------------------------------------------------------------------

    def finished(self, stage: int, like: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        saved = self.file.saved
        if saved is None or stage >= saved.whole("stage", MOST_STAGES):
            return None
        prefix = f"fit {stage} "
        tracked = {name: t for name, t in saved.named(prefix).items() if name not in like}
        if any(
            t.shape[1:] != like["mean"].shape[1:] for t in tracked.values()
        ):  # the first axis may cover some replicas, or all
            raise saved.unfit(f"{prefix}{', '.join(tracked)}")
        tensors = {name: saved.tensor(f"{prefix}{name}", tensor) for name, tensor in like.items()}
        self._fits[stage] = tensors | {name: t.to(like["mean"].device) for name, t in tracked.items()}
        return self._fits[stage]

    def end_fit(self, stage: int, result: dict[str, Tensor]) -> None:
        self._fits[stage], self._fit = result, None

    def begin_fit(self, stage: int, step: Step, stopped: Tensor, epochs: int, batches: int) -> Position | None:
        self._fit, saved = (stage, step, stopped), self.file.saved
        if saved is None:
            return None
        epoch, batch = saved.whole("epoch", epochs), saved.whole("batch", batches + 1)
        buffers, states = step.buffers(), saved.named("noise ")
        noise = [states[str(r)] for r in range(len(stopped)) if str(r) in states]
        values = [saved.tensor(f"step {i}", buffer) for i, buffer in enumerate(buffers)]
        position = Position(epoch, batch, saved.tensor("total", step.q.mean[:, 0]), noise)
        if noise or batch < batches:
            _check_noise(saved, noise, len(stopped))
        stopped.copy_(saved.tensor("stopped", stopped))
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
        step.resume(epoch * batches + batch)
        self.file.saved = None
        return position

    def due(self) -> bool:
        return self.file.due()

    def save(self, position: Position) -> None:
        self._position = position
        self.file.write(self)
        self.pause()

    # --- Resumable --------------------------------------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        description: dict[str, Any] = {"round": self._round, "outline": self._outline}
        description |= {"domains": self._domains} if any(self._domains) else {}
        description |= {"learned": self._learned, **({"reports": self._run.reports()} if self._learned else {})}
        if self._fit is not None and self._position is not None:
            description |= {"stage": self._fit[0], "epoch": self._position.epoch, "batch": self._position.batch}
        return description

    def tensors(self) -> dict[str, Tensor]:
        tensors = {f"run {name}": t for name, t in self._tensors.items()}
        tensors |= {f"kept {name}": t for name, t in self._run.network.trunk.state_dict().items()}
        tensors |= {f"extra {name}": t for name, t in self._extra.items()} | {"diverged": self._run.diverged}
        if self._fit is None or self._position is None:
            return tensors
        _, step, stopped = self._fit
        tensors |= {f"step {i}": buffer for i, buffer in enumerate(step.buffers())}
        tensors |= {f"noise {r}": noise for r, noise in enumerate(self._position.noise)}
        tensors |= {"total": self._position.total, "stopped": stopped}
        for k, result in self._fits.items():
            tensors |= {f"fit {k} {name}": tensor for name, tensor in result.items()}
        return tensors

    def load(self, saved: Saved) -> None:
        """Restore the round that was entered; `begin_fit` restores the fit in progress."""
        run, (seen, own) = self._run, self._heads
        learned = self._learned = saved.description.get("learned") is True
        device = run.network.posterior.mean.device
        tensors = {name: t.to(device) for name, t in saved.named("run ").items()}
        run.grow_trunk(self._round + learned)
        trunk = run.network.trunk
        shapes = {name: tuple(t.shape) for name, t in trunk.state_dict().items()}
        frozen = saved.named("kept ")
        if shapes != {name: tuple(t.shape) for name, t in frozen.items()}:
            raise saved.unfit("the network's frozen layers")
        extra = {name: saved.tensor(f"extra {name}", tensor) for name, tensor in self._extra.items()}
        accuracy = extra.get("accuracy")
        if accuracy is not None and bool((accuracy < 0).any() | (accuracy > 1).any()):
            raise saved.unfit("accuracy")
        diverged = saved.tensor("diverged", run.diverged)
        with saved.fitting():
            heads = [*seen, *own] if learned else seen
            run.load_tensors(tensors, saved.description.get("outline"), self._round + learned, heads)
            if learned and "reports" in saved.description:
                run.report(saved.description["reports"])
        trunk.load_state_dict(frozen)
        for name, tensor in self._extra.items():
            tensor.copy_(extra[name])
        run.diverged.copy_(diverged)
        if learned:
            self.file.saved = None


def _check_noise(saved: Saved, noise: Sequence[Tensor], replicas: int) -> None:
    """Check the states of CPU generators; without them, a fit can only be resumed at the end of an epoch."""
    try:
        if len(noise) != replicas:
            raise ValueError(f"{len(noise)} generators")
        for state in noise:
            torch.Generator().set_state(state)
    except (RuntimeError, TypeError, ValueError) as error:
        raise saved.unfit(f"noise: {str(error).splitlines()[0]}") from error
