"""Hugging Face Transformers: a callback that adds a method's terms to a `Trainer`'s training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from evcl._core.errors import EvclError, extra
from evcl.integrations.penalty import Penalty

with extra("transformers", "evcl.integrations.transformers needs transformers"):
    from transformers import TrainerCallback, TrainingArguments

__all__ = ["PenaltyCallback"]


class PenaltyCallback(TrainerCallback):
    """Adds the terms of a method such as `ewc`, `mas`, `vcl` or `evcl` to the training of a sequence classifier.

        callback = PenaltyCallback("ewc", strength=10)
        for data in tasks:
            Trainer(model, args, train_dataset=data, callbacks=[callback]).train()

    Each call of `train` is a task, and the callback remembers the earlier ones. The options are those of
    `evcl.integrations.Penalty`. A callback cannot change the loss, so the gradient of the terms is added to that of the
    loss before each step of the optimizer, after gradients were clipped. The loss that the trainer reports is that of
    the data alone; `callback.value` is the sum of the terms at the last step.

    The trainer's loss must be a mean over examples. With a Bayesian method, the model's weights become Gaussian when
    the first trainer is created; `callback.penalty.plain()` returns a copy of the model with ordinary weights, to save.
    """

    def __init__(self, method: str = "ewc", **options: Any) -> None:
        self.method, self.options = method, options
        self.penalty: Penalty | None = None  # created with the first trainer, for its model
        self.value = torch.zeros(())

    def on_init_end(
        self, args: TrainingArguments, state: object, control: object, model: nn.Module | None = None, **kwargs: object
    ) -> None:
        assert model is not None
        if self.penalty is None:
            self.penalty = Penalty(model, self.method, **self.options)
        elif self.penalty.module is not model:
            raise EvclError("the callback belongs to another model: give each model a callback of its own")

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: object,
        control: object,
        train_dataloader: DataLoader[object] | None = None,
        **kwargs: object,
    ) -> None:
        if self.penalty is None:
            raise EvclError("pass the callback to the Trainer, callbacks=[...]: it was added too late")
        if args.weight_decay and self.penalty.method.bayesian:
            raise EvclError("weight decay would make the standard deviations grow: use weight_decay=0")
        self.penalty.cancel()  # of a training that failed
        assert train_dataloader is not None
        self.penalty.begin(train_dataloader.dataset)

    def on_pre_optimizer_step(self, args: TrainingArguments, state: object, control: object, **kwargs: object) -> None:
        assert self.penalty is not None
        self.value = self.penalty.add_gradient()

    def on_train_end(self, args: TrainingArguments, state: object, control: object, **kwargs: object) -> None:
        assert self.penalty is not None
        self.penalty.end()
