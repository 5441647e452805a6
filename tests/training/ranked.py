"""Runs that several processes train together: started by torchrun in test_ranks.py, or called there, in one process."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from checks import run_of
from safetensors.torch import save_file

import evcl
from evcl import cli
from evcl._core.randomness import GeneratorNoise, generator
from evcl._core.ranks import Ranks, joined
from evcl.training import Observer, TaskData

F32, F64 = torch.float32, torch.float64
EXAMPLES, BATCH = 41, 8  # the last batch has one example: one of two processes has none of it


def mlp():
    return evcl.nn.mlp(6, [12, 12])


def layers():
    """By autograd: noise of other shapes, and dropout."""
    linear = torch.nn.utils.skip_init(torch.nn.Linear, 24, 10)
    conv = torch.nn.utils.skip_init(torch.nn.Conv1d, 1, 4, 3, padding=1)
    norm = torch.nn.GroupNorm(2, 4)
    rest = torch.nn.Dropout(0.2), torch.nn.Flatten(), linear, torch.nn.Tanh()
    return torch.nn.Sequential(torch.nn.Unflatten(1, (1, 6)), conv, norm, *rest)


def positions():
    """Draws that all examples share, in parts: convolutions, a linear layer along a sequence, a layer taken whole."""
    skip = torch.nn.utils.skip_init
    first = torch.nn.Unflatten(1, (1, 6)), skip(torch.nn.Conv1d, 1, 4, 3, padding=1), torch.nn.Tanh()
    whole = skip(torch.nn.ConvTranspose1d, 4, 3, 2)  # which starts from its own weights
    for weight in whole.parameters():
        torch.nn.init.normal_(weight, 0, 0.5, generator(0, "whole"))
    rest = skip(torch.nn.Linear, 7, 5), torch.nn.Tanh(), torch.nn.Flatten()
    return torch.nn.Sequential(*first, whole, torch.nn.Tanh(), *rest)


CASES = {
    "ewc": ("ewc", mlp, F32, {}),
    "ewc in float64": ("ewc", mlp, F64, {}),
    "evcl": ("evcl", mlp, F32, {"std_rate": 0.01}),
    "evcl in float64": ("evcl", mlp, F64, {"posterior": "diagonal", "fisher_draws": 2, "fisher_scale": "task"}),
    "noise handed in": ("evcl", mlp, F32, {"std_rate": 0.01}),
    "layers": ("evcl", layers, F64, {}),
    "positions": ("evcl", positions, F64, {}),
    "sampled": ("evcl", mlp, F64, {"posterior": "diagonal", "fisher": "sampled", "fisher_draws": 2}),
    "coresets": ("evcl", mlp, F64, {"coreset": "kcenter", "coreset_size": 5}),
    "stopped": ("evcl", mlp, F64, {"stop_nll": 0.69, "epochs": 20}),
}
ON_GPU = [name for name, case in CASES.items() if case[2] == F64]  # no kernels of evcl, which one process would use


def task(head, dtype, device="cpu"):
    source = generator(head, "task")
    x = torch.randn(1, EXAMPLES, 6, generator=source, dtype=dtype).to(device)
    return TaskData(x, (x[:, :, head] > 0).long(), head)


class Noted(Observer):
    def __init__(self) -> None:
        self.nll: list[torch.Tensor] = []

    def end_epoch(self, progress):
        self.nll.append(progress.nll)


def train(name: str, ranks: Ranks | None, device: str = "cpu", **more: Any) -> dict[str, torch.Tensor]:
    """Two tasks by two replicas: all that there is to save, and how many epochs each took."""
    method, network, dtype, given = CASES[name]
    given = {"epochs": 3, "batch_size": BATCH, "lr": 0.01, "strength": 10.0, **given, **more}
    run = run_of(method, network(), given, [0, 1], dtype=dtype, ranks=ranks, device=device)
    noted = Noted()
    for head in range(2):
        data = task(head, dtype, device)
        run.add_head(run.features(data.x[0, :1]), 2)
        if name == "noise handed in":
            noise = GeneratorNoise([generator(seed, "of one's own", head) for seed in (0, 1)])
            run.learn([data], observer=noted, noise=noise)
        else:
            run.learn([data], observer=noted)
    return {name: t.cpu() for name, t in {**cloned(run.tensors()), "nll": torch.stack(noted.nll)}.items()}


def cloned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The posterior may be the next prior, and a file wants memory that nothing shares."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def learn(ranks: Ranks | None) -> dict[str, torch.Tensor]:
    """A learner that stops early; of several, only the first one's callback says when."""

    class Enough(evcl.Callback):
        def end_epoch(self, epoch):
            return (ranks is None or ranks.rank == 0) and epoch.task == "b" and epoch.epoch == 2

    learner = evcl.EVCL(mlp(), seed=3, batch_size=BATCH, lr=0.05, dtype=F64).share(ranks)
    for head, name in enumerate("ab"):
        data = task(head, F64)
        options = {"validation": 0.2, "patience": 2} if name == "a" else {"class_weight": "balanced"}
        learner.learn((data.x[0], data.y[0]), name, epochs=30, callbacks=[Enough()], **options)
    tensors = learner.described()[1]
    return {**cloned(tensors), "epochs": torch.tensor([len(learner.history[name]) for name in "ab"])}


class Counting(Ranks):
    """It notes how many numbers are added up each time."""

    def __init__(self):
        super().__init__()
        self.sums = []

    def sum_(self, tensor):
        self.sums.append(tensor.numel())
        return super().sum_(tensor)


def command(folder: Path, *words: str) -> None:
    """`evcl` with these words; what a process prints is in a file."""
    sys.argv = ["evcl", *words]
    with (folder / f"said {os.environ['RANK']}").open("w") as said, contextlib.redirect_stdout(said):
        try:
            cli.main()
        except SystemExit as end:
            assert not end.code, end.code  # noqa: PT017


def main(folder: Path, device: str) -> None:
    torch.set_num_threads(1)
    with joined(device) as group:
        assert group is not None
        ranks = Counting()
        assert ranks.capturable == (device == "cuda")
        for name in CASES if device == "cpu" else ON_GPU:
            ranks.sums.clear()
            found = train(name, ranks, device)
            save_file({**found, "sums": torch.tensor(ranks.sums)}, folder / f"{name} {ranks.rank}.safetensors")
        if device == "cpu":
            save_file(learn(ranks), folder / f"learner {ranks.rank}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
