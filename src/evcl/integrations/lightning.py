"""Lightning: a callback that adds a method's terms to the training of a `LightningModule`."""

from __future__ import annotations

from typing import Any

import torch

from evcl._core.errors import EvclError, extra
from evcl.integrations.penalty import Penalty

with extra("lightning", "evcl.integrations.lightning needs lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["PenaltyCallback"]


class PenaltyCallback(Callback):
    """Adds the terms of a method such as `ewc`, `mas`, `vcl` or `evcl` to the training of a classifier.

        callback = PenaltyCallback("ewc", strength=10)
        for loader in tasks:
            Trainer(max_epochs=10, callbacks=[callback]).fit(module, loader)

    Each call of `fit` is a task, and the callback remembers the earlier ones. The options are those of
    `evcl.integrations.Penalty`. `forward` must map a batch to logits; if a part of the module does, `network` is its
    name. The gradient of the terms is added to that of the loss before each step of the optimizer, and before
    gradients are clipped. The loss that is logged is that of the data alone; `callback.value` is the sum of the terms
    at the last step.

    The loss must be a mean over examples, and there must be one optimizer. With a Bayesian method, the weights become
    Gaussian before `configure_optimizers` is called. Checkpoints include what the callback remembers.
    """

    def __init__(self, method: str = "ewc", *, network: str = "", **options: Any) -> None:
        self.method, self.network, self.options = method, network, options
        self.penalty: Penalty | None = None  # created when the first fit is set up, for its module
        self.value = torch.zeros(())
        self._state: dict[str, Any] | None = None

    def setup(self, trainer: object, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        module = pl_module.get_submodule(self.network)
        if self.penalty is None:
            self.penalty = Penalty(module, self.method, **self.options)
        elif self.penalty.module is not module:
            raise EvclError("the callback belongs to another module: give each module a callback of its own")
        if self._state is not None:
            self.penalty.load_state_dict(self._state)
            self._state = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.penalty is not None
        if len(trainer.optimizers) != 1:
            raise EvclError(f"the callback needs one optimizer, but the module has {len(trainer.optimizers)}")
        if self._state is not None:  # of a checkpoint
            self.penalty.load_state_dict(self._state)
            self._state = None
        self.penalty.cancel()  # of a training that failed
        loader = trainer.train_dataloader
        self.penalty.begin(getattr(loader, "dataset", loader))

    def on_before_optimizer_step(self, trainer: object, pl_module: LightningModule, optimizer: object) -> None:
        assert self.penalty is not None
        self.value = self.penalty.add_gradient()

    def on_train_end(self, trainer: object, pl_module: LightningModule) -> None:
        assert self.penalty is not None
        self.penalty.end()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.penalty is None else self.penalty.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict or None
