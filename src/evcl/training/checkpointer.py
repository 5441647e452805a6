"""Save a program while it learns a stream, and resume it later with bit-identical results.

The state between two steps is: the run before this round (a round either succeeds or leaves the run unchanged), the
results of the round's earlier fits, every buffer of the step, and a `Position`. Batches, random draws of a method and
draws for predictions are functions of (seed, round, epoch), so they are generated again and not saved. The evaluation
of a finished round is repeated too.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.ranks import Ranks
from evcl.methods import packing
from evcl.training.checkpoint import Checkpoints, Saved, clear, files, newest, write
from evcl.training.observer import Observer, Position
from evcl.training.run import Run
from evcl.training.state import State, tensors_of
from evcl.training.step import Step

Identity = list[dict[str, Any]]  # what a checkpoint belongs to: the configurations of a program, as JSON


class AnotherRun(EvclError):
    """A checkpoint that belongs to another run; `difference` says how the two differ."""

    def __init__(self, message: str = "", difference: str = "") -> None:
        super().__init__(message)
        self.difference = difference


class Stopped(BaseException):
    """Raised to end a run that was asked to stop; it can be resumed from its last checkpoint, if there is one."""


class Checkpointer(Observer):
    """Writes the checkpoints of one program. If a file cannot be written, the user is told, and training continues.

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
        """`checkpoints` are those of this program and belong to `identity`. `tell` receives messages for the user."""
        self.checkpoints, self.tell, self.ranks = checkpoints, tell, ranks
        self.identity: Identity = json.loads(json.dumps(identity))
        self.environment = dict(environment)
        self._saved = self._found()
        self._files = [] if self._saved is None else [self._saved.path]  # the last two: one may be damaged
        self._number = 0 if self._saved is None else int(self._saved.path.stem)
        self._before = 0.0 if self._saved is None else self._real("seconds")
        self._start = self._last = time.monotonic()
        self._failure: str | None = None
        self._round = 0
        self._run: Run
        self._extra: Mapping[str, Tensor] = {}
        self._domains: list[int] = []
        self._state: State | None = None  # the run's state at the start of the round
        self._fits: dict[int, dict[str, Tensor]] = {}  # results of the round's finished fits
        self._fit: tuple[int, Step, Tensor] | None = None  # the fit in progress

    @property
    def seconds(self) -> float:
        """Seconds that the program has run, including the time before it was resumed."""
        return self._before + time.monotonic() - self._start

    # --- rounds -----------------------------------------------------------------------------------------------------

    def first(self, rounds: int) -> int:
        """The round to resume; all rounds before it are learned and evaluated."""
        return 0 if self._saved is None else self._whole("round", rounds)

    def domains(self, tasks: int) -> list[int]:
        """The domains of the tasks that have begun, which are this many; empty if there is nothing to resume."""
        if self._saved is None:
            return []
        found = self._value("domains") or [0] * tasks
        right = isinstance(found, list) and len(found) == tasks and all(type(d) is int for d in found)
        if not right or not all(0 <= d <= max([-1, *found[:i]]) + 1 for i, d in enumerate(found)):
            raise self._wrong("domains")
        return found

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
        self._domains = list(domains)
        if self._saved is None:
            self._state = run.state()
            return False
        learned = self._value("learned") is True
        device = run.network.posterior.mean.device
        tensors = {name: t.to(device) for name, t in self._named("run ").items()}
        run.grow_trunk(number + learned)
        trunk = run.network.trunk
        shapes = {name: tuple(t.shape) for name, t in trunk.state_dict().items()}
        frozen = self._named("kept ")
        if shapes != {name: tuple(t.shape) for name, t in frozen.items()}:
            raise self._wrong("the network's frozen layers")
        found = {name: self._tensor(f"extra {name}", tensor) for name, tensor in self._extra.items()}
        accuracy = found.get("accuracy")
        if accuracy is not None and bool((accuracy < 0).any() | (accuracy > 1).any()):
            raise self._wrong("accuracy")
        diverged = self._tensor("diverged", run.diverged)
        try:
            heads = [*seen, *own] if learned else seen
            run.load_tensors(tensors, self._value("outline"), number + learned, heads)
        except (EvclError, KeyError, RuntimeError) as error:
            raise self._wrong(str(error)) from error
        trunk.load_state_dict(frozen)
        for name, tensor in self._extra.items():
            tensor.copy_(found[name])
        run.diverged.copy_(diverged)
        self._state = run.state()
        if learned:
            self._saved = None
        return learned

    def learned(self) -> None:
        """Called when the round is learned and only its evaluation remains."""
        self._saved = self._fit = None
        self._fits = {}
        self._write(self._run.state(), {"learned": True}, {})
        self.pause()

    def pause(self) -> None:
        """End here if asked to; a resumed run repeats the work since the last checkpoint."""
        if self.stopping():
            raise Stopped

    # --- fits: Observer ---------------------------------------------------------------------------------------------

    def finished(self, stage: int, like: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        if self._saved is None or stage >= self._whole("stage", 10_000):
            return None
        prefix = f"fit {stage} "
        tracked = {name: t for name, t in self._named(prefix).items() if name not in like}
        if any(
            t.shape[1:] != like["mean"].shape[1:] for t in tracked.values()
        ):  # the first axis may cover some replicas, or all
            raise self._wrong(f"{prefix}{', '.join(tracked)}")
        found = {name: self._tensor(f"{prefix}{name}", tensor) for name, tensor in like.items()}
        self._fits[stage] = found | {name: t.to(like["mean"].device) for name, t in tracked.items()}
        return self._fits[stage]

    def end_fit(self, stage: int, result: dict[str, Tensor]) -> None:
        self._fits[stage], self._fit = result, None

    def begin_fit(self, stage: int, step: Step, stopped: Tensor, epochs: int, batches: int) -> Position | None:
        self._fit = stage, step, stopped
        if self._saved is None:
            return None
        epoch, batch = self._whole("epoch", epochs), self._whole("batch", batches + 1)
        buffers, states = step.buffers(), self._named("noise ")
        noise = [states[str(r)] for r in range(len(stopped)) if str(r) in states]
        found = [self._tensor(f"step {i}", buffer) for i, buffer in enumerate(buffers)]
        position = Position(epoch, batch, self._tensor("total", step.q.mean[:, 0]), noise)
        if noise or batch < batches:
            self._check_noise(noise, len(stopped))
        stopped.copy_(self._tensor("stopped", stopped))
        for buffer, value in zip(buffers, found, strict=True):
            buffer.copy_(value)
        step.update.resume(epoch * batches + batch)
        self._saved = None
        return position

    def due(self) -> bool:
        seconds = self.checkpoints.seconds
        asked = self.checkpoints.stop is not None and self.checkpoints.stop()
        return asked or (seconds > 0 and time.monotonic() - self._last >= seconds)

    def save(self, position: Position) -> None:
        assert self._state is not None
        assert self._fit is not None
        stage, step, stopped = self._fit
        tensors = {f"step {i}": buffer for i, buffer in enumerate(step.buffers())}
        tensors |= {f"noise {r}": noise for r, noise in enumerate(position.noise)}
        tensors |= {"total": position.total, "stopped": stopped}
        for k, result in self._fits.items():
            tensors |= {f"fit {k} {name}": tensor for name, tensor in result.items()}
        where = {"learned": False, "stage": stage, "epoch": position.epoch, "batch": position.batch}
        self._write(self._state, where, tensors)
        self.pause()

    # --- files ------------------------------------------------------------------------------------------------------

    def stopping(self) -> bool:
        """Whether to end. Either all processes call this or none; they all follow the first one's answer."""
        asked = self.checkpoints.stop is not None and self.checkpoints.stop()
        return asked if self.ranks is None else self.ranks.first(asked, self._run.network.posterior.mean.device)

    def _write(self, state: State, place: Mapping[str, Any], more: Mapping[str, Tensor]) -> None:
        if self.ranks is not None and self.ranks.rank > 0:
            self._last = time.monotonic()
            return
        tensors = {f"run {name}": t for name, t in tensors_of(state).items()}
        tensors |= {f"kept {name}": t for name, t in self._run.network.trunk.state_dict().items()}
        tensors |= {f"extra {name}": t for name, t in self._extra.items()} | {"diverged": self._run.diverged, **more}
        where = {"round": self._round, "outline": packing.outline(state.memory), **place}
        where |= {"domains": self._domains} if any(self._domains) else {}
        about = {"owner": self.identity, "environment": self.environment}
        folder = self.checkpoints.folder
        path = folder / f"{self._number + 1:08d}.safetensors"
        try:
            if not self._files:  # not later: a folder that vanished may be on a disk that comes back
                folder.mkdir(parents=True, exist_ok=True)
            write(path, {**about, "seconds": self.seconds, **where}, tensors)
        except (EvclError, OSError) as error:
            reason = str(error) if isinstance(error, EvclError) else f"cannot write {path}: {error.strerror or error}"
            if self._failure is None:
                last = f"the last checkpoint is {self._files[-1]}" if self._files else "there is no checkpoint yet"
                self.tell(f"{reason}; training continues, and {last}")
            self._failure = reason
        else:
            if self._failure is not None:
                self.tell(f"checkpoints can be written again: {path}")
            self._failure, self._number, self._files = None, self._number + 1, [*self._files[-1:], path]
            clear(folder, self._files)
        self._last = time.monotonic()

    def _found(self) -> Saved | None:
        """The checkpoint to resume from."""
        folder = self.checkpoints.folder
        if not self.checkpoints.resume:
            if files(folder):
                raise EvclError(unfinished(folder))
            return None
        saved = newest(folder)
        if saved is not None:
            check_identity(saved, self.identity)
            if self.ranks is None or self.ranks.rank == 0:
                clear(folder, files(folder))  # files left by interrupted writes
            if saved.description.get("environment") != self.environment:
                self.tell(f"{saved.path} was written in another environment: results may differ by rounding")
        return saved

    # --- checking the contents of a file ----------------------------------------------------------------------------

    def _wrong(self, what: str) -> EvclError:
        assert self._saved is not None
        again = "remove it, or start again with --overwrite"
        return EvclError(f"the checkpoint {self._saved.path} does not fit the run ({what}): {again}")

    def _value(self, key: str) -> Any:
        assert self._saved is not None
        return self._saved.description.get(key)

    def _whole(self, key: str, below: int) -> int:
        value = self._value(key)
        if type(value) is not int or not 0 <= value < below:
            raise self._wrong(f"{key} is {str(value)[:60]!r}, but there are only {below}")
        return value

    def _real(self, key: str) -> float:
        value = self._value(key)
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise self._wrong(f"{key} {str(value)[:60]!r}")
        return float(value)

    def _named(self, prefix: str) -> dict[str, Tensor]:
        assert self._saved is not None
        tensors = self._saved.tensors
        return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

    def _tensor(self, name: str, like: Tensor) -> Tensor:
        assert self._saved is not None
        found = self._saved.tensors.get(name)
        if found is None or found.shape != like.shape or found.dtype != like.dtype:
            raise self._wrong(f"{name} must be {like.dtype} {tuple(like.shape)}")
        return found.to(like.device)

    def _check_noise(self, noise: Sequence[Tensor], replicas: int) -> None:
        """Check the states of CPU generators; without them, a fit can only be resumed at the end of an epoch."""
        try:
            if len(noise) != replicas:
                raise ValueError(f"{len(noise)} generators")
            for state in noise:
                torch.Generator().set_state(state)
        except (RuntimeError, TypeError, ValueError) as error:
            raise self._wrong(f"noise: {str(error).splitlines()[0]}") from error


def unfinished(folder: object) -> str:
    return (
        f"{folder} contains the checkpoint of an unfinished run: "
        "pass --resume to continue it, or --overwrite to start again"
    )


def check_identity(saved: Saved, identity: Identity) -> None:
    """Raise unless the checkpoint belongs to the same program."""
    theirs = saved.description.get("owner")
    if theirs != identity:
        difference = _difference(identity, theirs)
        what = f"{saved.path} is a checkpoint of another run ({difference})"
        raise AnotherRun(f"{what}: pass --overwrite or another --out", difference)


def _difference(ours: Identity, theirs: Any) -> str:
    for own, other in zip(ours, theirs if isinstance(theirs, list) else (), strict=False):
        for key, value in own.items():
            there = other.get(key) if isinstance(other, dict) else None
            if there != value:
                return f"{key} is {str(there)[:60]} there and {str(value)[:60]} here"
    return "of other configurations"
