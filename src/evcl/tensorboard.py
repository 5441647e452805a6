"""TensorBoard: a callback that writes each epoch's metrics to a folder. `import evcl` does not need it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from evcl.callbacks import Callback, Epoch
from evcl.errors import EvclError

METRICS = ("loss", "nll", "kl", "elastic", "other", "lr", "validation_nll", "validation_accuracy")


class TensorBoard(Callback):
    """`learner.learn(..., callbacks=[TensorBoard("runs/first")])`, then `tensorboard --logdir runs`.

    One curve a metric and task: `nll/january` over the epochs of January. `writer` is anything with `add_scalar`,
    `flush` and `close`, instead of torch's `SummaryWriter` on the folder.
    """

    def __init__(self, folder: str | os.PathLike[str], *, writer: Any = None) -> None:
        if writer is None:
            try:
                from torch.utils.tensorboard.writer import SummaryWriter
            except ImportError as error:
                raise EvclError(f"TensorBoard needs pip install 'evcl[tensorboard]' ({error})") from None
            writer = SummaryWriter(os.fspath(folder))
        self.writer = writer

    def end_epoch(self, epoch: Epoch) -> None:
        for metric in METRICS:
            value = getattr(epoch, metric)
            if value is not None:
                self.writer.add_scalar(f"{metric}/{epoch.task}", value, epoch.epoch)

    def end_task(self, task: str, history: Sequence[Epoch]) -> None:
        self.writer.flush()

    def close(self) -> None:
        """Of use where a program goes on for long: what is written is on disk at the end of each task."""
        self.writer.close()
