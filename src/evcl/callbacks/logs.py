"""Callbacks that write each epoch's metrics to files: a CSV table, or TensorBoard's. `evcl run --log` makes them."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from evcl._core.errors import EvclError, extra
from evcl.callbacks.callback import Callback, Epoch

KINDS = ("csv", "tensorboard")
COLUMNS = ("task", "stage", "epoch", "loss", "nll", "terms", "lr", "validation_nll", "validation_accuracy")


class CsvLog(Callback):
    """`learner.learn(..., callbacks=[CsvLog("epochs.csv")])`: one line per epoch, added to the end of the file at once.

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
            self._rows.writerow(COLUMNS)

    def begin_task(self, task: str, epochs: int) -> None:
        self._task = None  # the same one may have been interrupted

    def begin_epoch(self, task: str, epoch: int) -> None:
        """A task that is resumed, or learned again, replaces its lines from here on."""
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
        self._rows.writerow("" if values[name] is None else values[name] for name in COLUMNS)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard(Callback):
    """`learner.learn(..., callbacks=[TensorBoard("runs/first")])`, then `tensorboard --logdir runs`.

    One curve per metric and task: `nll/january` over the epochs of January. `writer` is anything with `add_scalar`,
    `flush` and `close`, instead of torch's `SummaryWriter` on the folder.
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
        """Of use in a program that runs on for long: what is written is on disk at the end of each epoch."""
        self.writer.close()


class Log(NamedTuple):
    """What `evcl run --log` asks for: a file or folder per seed, in this folder."""

    kind: str
    folder: Path

    def clear(self) -> None:
        """Remove what earlier logs wrote there, and nothing else."""
        for path in self.folder.glob("seed-*"):
            if not path.stem.removeprefix("seed-").isdecimal():
                continue
            if path.suffix == ".csv":
                path.unlink(missing_ok=True)
            for events in path.glob("events.out.tfevents.*"):
                events.unlink(missing_ok=True)

    def callback(self, seed: int) -> CsvLog | TensorBoard:
        makers: dict[str, Callable[[Path], CsvLog | TensorBoard]] = {
            "csv": lambda path: CsvLog(path.with_suffix(".csv")),
            "tensorboard": TensorBoard,
        }
        if self.kind not in makers:
            raise EvclError(f"--log must be {' or '.join(KINDS)}, not {self.kind!r}")
        return makers[self.kind](self.folder / f"seed-{seed}")
