"""Learning with checkpoints: a call of `learn` that was interrupted resumes where it stopped."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

import torch

from evcl._core.errors import Diverged, EvclError
from evcl._core.interrupts import deferred
from evcl.learner.persist import Described
from evcl.training import Checkpointer, Checkpoints, History, Observers, Run, TaskData, Validation
from evcl.training.checkpoint import AnotherRun


def learn(
    run: Run,
    folder: Path,
    about: Described,
    tasks: list[TaskData],
    report: History,
    validation: Validation | None,
) -> None:
    """Learn tasks with checkpoints, resuming from the last one if there is any. The checkpoints are not removed.

    `about` describes the call, including its epochs. A checkpoint of a call that differs, or of other data, is refused.
    """
    mean = run.network.posterior.mean
    digest = hashlib.blake2b(digest_size=16)
    datasets = tasks if validation is None else [*tasks, validation.data]
    for tensor in (mean, *(t for data in datasets for t in (data.x, data.y, data.weights))):
        if tensor is not None:
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    identity = {**about, "data": digest.hexdigest()}
    environment = {"torch": torch.__version__, "device": str(mean.device)}
    with deferred() as stop:
        checkpoints = Checkpoints(folder, resume=True, stop=stop)
        try:
            checkpointer = Checkpointer(checkpoints, [identity], environment, warnings.warn, run.ranks)
        except AnotherRun as error:
            what = f"{folder} holds the checkpoint of another task ({error.difference})"
            raise EvclError(f"{what}: finish that task, or remove the folder") from None
        try:
            if not checkpointer.enter(run.rounds, run, run.seen, [task.head for task in tasks]):
                run.learn(tasks, about["epochs"], Observers(report, checkpointer), validation)
        except Diverged:
            checkpoints.remove_own()  # resumed, it would diverge again
            raise
        if checkpointer.stopping():  # after the last step
            checkpointer.learned()


def remove(run: Run, folder: Path) -> None:
    """Remove the checkpoints of a call that has ended; every process of the run waits until they are removed."""
    if run.ranks is None or run.ranks.rank == 0:
        Checkpoints(folder).remove_own()
    if run.ranks is not None:
        run.ranks.first(True, run.network.posterior.mean.device)
