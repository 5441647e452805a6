"""Callbacks that log each epoch's metrics to a CSV file or to TensorBoard. `evcl run --log` uses them."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any, NamedTuple

from evcl._core.errors import EvclError, extra
from evcl.callbacks import Callback, Epoch

__all__ = ["CsvLog", "TensorBoard"]

LOG_KINDS = ("csv", "tensorboard")
LOG_COLUMNS = ("task", "stage", "epoch", "loss", "nll", "terms", "lr", "validation_nll", "validation_accuracy")


class CsvLog(Callback):
    """`learner.learn(..., callbacks=[CsvLog("epochs.csv")])`: one line per epoch, appended as soon as it ends.

    The column `terms` holds what the method adds to the NLL, as "kl=0.012 elastic=0.003".
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", newline="", encoding="utf-8")
        except OSError as error:
            raise EvclError(f"cannot write {self.path}: {error.strerror or error}") from error
        self._rows = csv.writer(self._file)
        self._task: str | None = None
        if self._file.tell() == 0:
            self._rows.writerow(LOG_COLUMNS)

    def begin_task(self, task: str, epochs: int) -> None:
        self._task = None  # the same task may have been interrupted before

    def begin_epoch(self, task: str, epoch: int) -> None:
        """When a task is resumed or learned again, remove its old lines from this epoch on."""
        if task == self._task:
            return
        self._task = task
        self._file.flush()
        with self.path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        numbers = [int(row[2]) if row[:1] == [task] and row[2:3] and row[2].isdecimal() else 0 for row in rows]
        kept = [row for row, number in zip(rows, numbers, strict=True) if number < epoch]
        if len(kept) < len(rows):
            self._file.seek(0)
            self._file.truncate()
            self._rows.writerows(kept)

    def end_epoch(self, epoch: Epoch) -> None:
        terms = " ".join(f"{name}={value:.6g}" for name, value in epoch.terms.items())
        values = {**vars(epoch), "loss": epoch.loss, "terms": terms}
        self._rows.writerow("" if values[name] is None else values[name] for name in LOG_COLUMNS)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard(Callback):
    """`learner.learn(..., callbacks=[TensorBoard("runs/first")])`, then `tensorboard --logdir runs`.

    One curve per metric and task: `nll/january` over the epochs of January. `writer` is any object with `add_scalar`,
    `flush` and `close`, to use instead of torch's `SummaryWriter` for the folder.
    """

    def __init__(self, folder: str | os.PathLike[str], *, writer: Any = None) -> None:
        if writer is None:
            with extra("tensorboard", "this callback needs TensorBoard"):
                from torch.utils.tensorboard.writer import SummaryWriter
            writer = SummaryWriter(os.fspath(folder))
        self.writer = writer

    def end_epoch(self, epoch: Epoch) -> None:
        metrics: dict[str, float | None] = {"loss": epoch.loss, "nll": epoch.nll, **epoch.terms, "lr": epoch.lr}
        metrics |= {"validation_nll": epoch.validation_nll, "validation_accuracy": epoch.validation_accuracy}
        for metric, value in metrics.items():
            if value is not None:
                self.writer.add_scalar(f"{metric}/{epoch.task}", value, epoch.epoch)
        self.writer.flush()

    def close(self) -> None:
        """Close the writer. Needed only in a long-running program: metrics are flushed to disk after each epoch."""
        self.writer.close()


class Log(NamedTuple):
    """The log that `evcl run --log` asks for: one file or folder per seed, inside `folder`."""

    kind: str
    folder: Path

    @classmethod
    def checked(cls, kind: str, folder: Path) -> Log:
        if kind not in LOG_KINDS:
            raise EvclError(f"--log must be {' or '.join(LOG_KINDS)}, not {kind!r}")
        return cls(kind, folder)

    def clear(self) -> None:
        """Remove the files of earlier logs from the folder, and nothing else."""
        for path in self.folder.glob("seed-*"):
            if not path.stem.removeprefix("seed-").isdecimal():
                continue
            if path.suffix == ".csv":
                path.unlink(missing_ok=True)
            for events in path.glob("events.out.tfevents.*"):
                events.unlink(missing_ok=True)

    def callback(self, seed: int) -> CsvLog | TensorBoard:
        path = self.folder / f"seed-{seed}"
        return CsvLog(path.with_suffix(".csv")) if self.kind == "csv" else TensorBoard(path)
