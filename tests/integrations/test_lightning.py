"""A penalty in a Trainer of Lightning."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from others import needed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evcl

needed("lightning")
import lightning.pytorch as pl  # noqa: E402

from evcl.integrations.lightning import PenaltyCallback  # noqa: E402

TASKS = evcl.benchmarks.get("permuted-digits", tasks=2)


class Classifier(pl.LightningModule):
    def __init__(self, penalty=None):
        super().__init__()
        torch.manual_seed(1)
        self.network = nn.Sequential(nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 10))
        self.penalty = penalty

    def forward(self, x):
        return self.network(x)

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 3e-3)


def fit(module, callbacks, task, epochs=5, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    quiet["enable_checkpointing"] = "default_root_dir" in options
    trainer = pl.Trainer(max_epochs=epochs, callbacks=callbacks, **quiet, **options)
    loader = DataLoader(TensorDataset(*task.train), 64, shuffle=True, generator=torch.Generator().manual_seed(0))
    trainer.fit(module, loader)
    return trainer


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def accuracy(module, task):
    module.eval()
    return float((module(task.test.x).argmax(1) == task.test.y).double().mean())


@pytest.mark.parametrize("method", ["ewc", "evcl"])
def test_the_callback_keeps_what_is_forgotten_without_it(method):
    results = []
    for callbacks in ([], [PenaltyCallback(method)]):
        module = Classifier()
        for task in TASKS:
            fit(module, callbacks, task, epochs=15)
        results.append([accuracy(module, task) for task in TASKS])
    assert results[1][0] > results[0][0] + 0.08
    assert results[1][1] > 0.6


def test_two_strengths_differ_and_a_part_of_the_module_may_be_named():
    moved = []
    for strength, name in ((0.0, ""), (1.0, "network"), (100.0, "network")):
        module, callback = Classifier(), PenaltyCallback("ewc", strength=strength, network=name)
        fit(module, [callback], TASKS[0])
        first = flat(module)
        fit(module, [callback], TASKS[1])
        moved.append(float((flat(module) - first).norm()))
    assert moved[2] < 0.97 * moved[1] < 0.97 * moved[0]


def test_accumulated_batches_have_the_penalty_once():
    """Two batches of 32 per step are one of 64."""
    results = []
    for size, parts in ((64, 1), (32, 2)):
        module, callback = Classifier(), PenaltyCallback("ewc", strength=30.0)
        for task in TASKS:
            quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
            trainer = pl.Trainer(max_epochs=1, callbacks=[callback], accelerator="cpu", enable_checkpointing=False,
                                 accumulate_grad_batches=parts, **quiet)  # fmt: skip
            rows = TensorDataset(task.train.x[:640], task.train.y[:640])
            trainer.fit(module, DataLoader(rows, size))
        results.append(flat(module))
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-5)


def test_a_checkpoint_has_what_the_callback_remembers(tmp_path):
    module, callback = Classifier(), PenaltyCallback("ewc")
    trainer = fit(module, [callback], TASKS[0], default_root_dir=tmp_path)
    path = tmp_path / "one.ckpt"
    trainer.save_checkpoint(path)
    fit(module, [callback], TASKS[1])
    other, again = Classifier(), PenaltyCallback("ewc")
    state = torch.load(path, weights_only=True)
    other.load_state_dict(state["state_dict"])
    again.load_state_dict(next(value for key, value in state["callbacks"].items() if "PenaltyCallback" in key))
    fit(other, [again], TASKS[1])
    assert torch.equal(flat(other), flat(module))
    assert again.penalty.tasks == 2


def test_another_module_is_refused():
    callback = PenaltyCallback("ewc")
    fit(Classifier(), [callback], TASKS[0], epochs=1)
    with pytest.raises(evcl.EvclError, match="belongs to another module"):
        fit(Classifier(), [callback], TASKS[0], epochs=1)
