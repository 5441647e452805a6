"""A program that saves itself on its way through a stream, and goes on from there, bit for bit.

What lies between two steps is: the run before this stage of the round (a round either ends well or leaves the run as it
was), every buffer of the step, and a `Mark`. Batches, coresets and draws are functions of (seed, round, epoch) and are
made again; so is the evaluation of a round that was learned.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from evcl.errors import EvclError
from evcl.training.checkpoint import Checkpoints, Saved, clear, files, newest, write
from evcl.training.run import Run, State
from evcl.training.task import Step
from evcl.training.watch import Mark

STAGES = ("train", "tune", "learned")
Owner = list[dict[str, Any]]  # the configurations of a program, in words that JSON has


class Stopped(BaseException):
    """The program was asked to save itself and end, and has."""


class Saver:
    """Keeps the checkpoints of one program; a `Watch`. Files that cannot be written are told of, and it goes on."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        owner: Owner,
        environment: Mapping[str, Any],
        tell: Callable[[str], object] = lambda note: None,
    ) -> None:
        """`checkpoints` are the program's own, and belong to `owner`; `tell` hears of what a user should know."""
        self.checkpoints, self.tell = checkpoints, tell
        self.owner: Owner = json.loads(json.dumps(owner))
        self.environment = dict(environment)
        self._saved = self._found()
        self._kept = [] if self._saved is None else [self._saved.path]
        self._number = 0 if self._saved is None else int(self._saved.path.stem)
        self._before = 0.0 if self._saved is None else self._real("seconds")
        self._start = self._last = time.monotonic()
        self._failure: str | None = None
        self._round = 0
        self._run: Run
        self._accuracy: Tensor
        self._stage: tuple[State, bool] | None = None  # what a stage begins with, and whether it is on coresets
        self._loop: tuple[Step, Tensor] | None = None

    @property
    def seconds(self) -> float:
        """That the program has taken, those before it was gone on with among them."""
        return self._before + time.monotonic() - self._start

    # --- what learn_stream tells ------------------------------------------------------------------------------------

    def first(self, rounds: int) -> int:
        """The round that it goes on with; those before it are learned and measured."""
        if self._saved is None:
            return 0
        if self._saved.description.get("stage") not in STAGES:
            raise self._wrong("stage")
        return self._whole("round", rounds)

    def enter(
        self, number: int, run: Run, accuracy: Tensor, heads: tuple[list[int], list[int]], shape: tuple[int, ...]
    ) -> bool:
        """A round begins. If it is the one to go on with: puts the run and `accuracy` where they were.

        `heads` are those of the tasks before this round, and with its own; `shape` is an input's. Returns whether the
        round is learned already.
        """
        self._round, self._run, self._accuracy = number, run, accuracy
        if self._saved is None:
            return False
        stage = self._saved.description["stage"]
        keeps = run.settings.get("coreset", "none") != "none"
        kept = heads[stage != "train"] if keeps else []
        mean = run.network.posterior.mean
        tensors = {name: t.to(mean.device) for name, t in self._named("run ").items()}
        trunk = run.network.trunk
        own = {name: tuple(t.shape) for name, t in trunk.state_dict().items()}
        frozen = self._named("kept ")
        if own != {name: tuple(t.shape) for name, t in frozen.items()}:
            raise self._wrong("the network's frozen layers")
        measured = self._tensor("accuracy", accuracy)
        if not bool((measured.isnan() | ((measured >= 0) & (measured <= 1))).all()):
            raise self._wrong("accuracy")
        lost = self._tensor("lost", run.lost)
        if any(tensors.get(f"coreset {i}.x", mean).shape[2:] != shape for i in range(len(kept))):
            raise self._wrong("the inputs of its coresets")
        try:
            run.load_tensors(tensors, number + (stage != "train"), kept, tuned=stage == "learned" and bool(kept))
        except (EvclError, KeyError, RuntimeError) as error:
            raise self._wrong(str(error)) from error
        trunk.load_state_dict(frozen)
        accuracy.copy_(measured)
        run.lost.copy_(lost)
        if stage == "learned":
            self._saved = None
            return True
        return False

    def learned(self) -> None:
        """The round is learned; what is left of it is its evaluation."""
        self._saved = self._stage = self._loop = None
        self._write("learned", self._run.state(), {}, {})
        self.pause()

    def pause(self) -> None:
        """End here, if that was asked for: what is done since the last checkpoint is done again."""
        if self._stop():
            raise Stopped

    # --- what a run tells: Watch ------------------------------------------------------------------------------------

    @property
    def tuning(self) -> bool:
        return self._saved is not None and self._saved.description["stage"] == "tune"

    def stage(self, state: State, tuning: bool) -> None:
        self._stage = state, tuning

    def begin(self, step: Step, sure: Tensor, epochs: int, batches: int) -> Mark | None:
        self._loop = step, sure
        if self._saved is None:
            return None
        epoch, batch = self._whole("epoch", epochs), self._whole("batch", batches + 1)
        buffers, states = step.buffers(), self._named("noise ")
        noise = [states[str(r)] for r in range(len(sure)) if str(r) in states]
        found = [self._tensor(f"step {i}", buffer) for i, buffer in enumerate(buffers)]
        mark = Mark(epoch, batch, self._tensor("total", step.q.mean[:, 0]), noise)
        if noise or batch < batches:
            self._check_noise(noise, len(sure))
        sure.copy_(self._tensor("sure", sure))
        for buffer, value in zip(buffers, found, strict=True):
            buffer.copy_(value)
        step.update.resume(epoch * batches + batch)
        self._saved = None
        return mark

    def due(self) -> bool:
        seconds = self.checkpoints.seconds
        return self._stop() or (seconds > 0 and time.monotonic() - self._last >= seconds)

    def save(self, mark: Mark) -> None:
        assert self._stage is not None
        assert self._loop is not None
        (state, tuning), (step, sure) = self._stage, self._loop
        tensors = {f"step {i}": buffer for i, buffer in enumerate(step.buffers())}
        tensors |= {f"noise {r}": noise for r, noise in enumerate(mark.noise)}
        tensors |= {"total": mark.total, "sure": sure}
        place = {"epoch": mark.epoch, "batch": mark.batch}
        self._write("tune" if tuning else "train", state, place, tensors)
        self.pause()

    # --- files ------------------------------------------------------------------------------------------------------

    def _stop(self) -> bool:
        return self.checkpoints.stop is not None and self.checkpoints.stop()

    def _write(self, stage: str, state: State, place: Mapping[str, int], more: Mapping[str, Tensor]) -> None:
        tensors = {f"run {name}": t for name, t in state.tensors.items()}
        if stage != "learned":  # it is made anew before anything is predicted
            tensors = {name: t for name, t in tensors.items() if not name.startswith("run tuned.")}
        tensors |= {f"kept {name}": t for name, t in self._run.network.trunk.state_dict().items()}
        tensors |= {"accuracy": self._accuracy, "lost": self._run.lost, **more}
        where = {"round": self._round, "stage": stage, **place}
        about = {"owner": self.owner, "environment": self.environment}
        folder = self.checkpoints.folder
        path = folder / f"{self._number + 1:08d}.safetensors"
        try:
            if not self._kept:  # later it is not: what vanished may be a disk, and come back
                folder.mkdir(parents=True, exist_ok=True)
            write(path, {**about, "seconds": self.seconds, **where}, tensors)
        except (EvclError, OSError) as error:
            reason = str(error) if isinstance(error, EvclError) else f"cannot write {path}: {error.strerror or error}"
            if self._failure is None:
                kept = f"the last checkpoint is {self._kept[-1]}" if self._kept else "there is no checkpoint yet"
                self.tell(f"{reason}; training goes on, and {kept}")
            self._failure = reason
        else:
            if self._failure is not None:
                self.tell(f"checkpoints can be written again: {path}")
            self._failure, self._number, self._kept = None, self._number + 1, [*self._kept[-1:], path]
            clear(folder, self._kept)
        self._last = time.monotonic()

    def _found(self) -> Saved | None:
        """The checkpoint to go on from."""
        folder = self.checkpoints.folder
        if not self.checkpoints.resume:
            if files(folder):
                raise EvclError(unfinished(folder))
            return None
        saved = newest(folder)
        if saved is not None:
            check_owner(saved, self.owner)
            clear(folder, files(folder))  # what a write that was cut off has left
            if saved.description.get("environment") != self.environment:
                self.tell(f"{saved.path} was written in another environment: the result may differ by rounding")
        return saved

    # --- what a file says, checked ----------------------------------------------------------------------------------

    def _wrong(self, what: str) -> EvclError:
        assert self._saved is not None
        return EvclError(f"the checkpoint {self._saved.path} does not fit the run ({what}): start again, --overwrite")

    def _value(self, key: str) -> Any:
        assert self._saved is not None
        return self._saved.description.get(key)

    def _whole(self, key: str, below: int) -> int:
        value = self._value(key)
        if type(value) is not int or not 0 <= value < below:
            raise self._wrong(f"{key} {str(value)[:60]!r}, and there are {below}")
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
            raise self._wrong(f"{name} should be {like.dtype} {tuple(like.shape)}")
        return found.to(like.device)

    def _check_noise(self, noise: Sequence[Tensor], replicas: int) -> None:
        """States of a CPU's generators; without them only an epoch that has ended can be gone on from."""
        try:
            if len(noise) != replicas:
                raise ValueError(f"{len(noise)} generators")
            for state in noise:
                torch.Generator().set_state(state)
        except (RuntimeError, TypeError, ValueError) as error:
            raise self._wrong(f"noise: {str(error).splitlines()[0]}") from error


def unfinished(folder: object) -> str:
    return (
        f"{folder} holds the checkpoint of a run that was not finished: "
        "pass --resume to go on with it, or --overwrite to start again"
    )


def check_owner(saved: Saved, owner: Owner) -> None:
    """Make sure that the checkpoint is of the same program."""
    theirs = saved.description.get("owner")
    if theirs != owner:
        raise EvclError(
            f"{saved.path} is a checkpoint of another run ({_difference(owner, theirs)}): "
            "pass --overwrite or another --out"
        )


def _difference(ours: Owner, theirs: Any) -> str:
    for own, other in zip(ours, theirs if isinstance(theirs, list) else (), strict=False):
        for key, value in own.items():
            there = other.get(key) if isinstance(other, dict) else None
            if there != value:
                return f"{key} is {str(there)[:60]} there and {str(value)[:60]} here"
    return "of other configurations"
