"""What keeps each method from forgetting: a setting with a weak and a strong value, and a second task with either."""

from __future__ import annotations

import torch
from checks import run_of

import evcl
from evcl._core.randomness import generator
from evcl.methods import METHODS, TaskData
from evcl.nn import Gaussian

INPUTS, HIDDEN, EXAMPLES = 6, 12, 60
USUAL = {"epochs": 8, "batch_size": 20, "coreset_size": 5, "memory": 10, "generator_width": 20}
LR = 0.02  # of the means, for methods that have a rate of this unit
OWN_STEPS = ("vogn", "ivon", "noisy-kfac", "ekf")

ELASTIC = ("strength", 0.1, 1000.0)
KL = ("tempering", 0.01, 100.0)
STRENGTHS = {
    **dict.fromkeys(
        (
            "evcl",
            "evcl-film",
            "evcl-paper",
            "evcl-er",
            "kfac-evcl",
            "gvcl",
            "gvcl-film",
            "ewc",
            "ewc-offline",
            "kfac-ewc",
        ),
        ELASTIC,
    ),
    **dict.fromkeys(("evcl-dgr", "si", "mas", "xdg", "lwf", "fromp"), ELASTIC),
    **dict.fromkeys(("vcl", "vcl-random-coreset", "vcl-kcenter-coreset", "improved-vcl", "td-vcl"), KL),
    **dict.fromkeys(("vogn", "ivon", "noisy-kfac"), KL),
    "ekf": ("tempering", 0.5, 100.0),
    **dict.fromkeys(("imm-mean", "imm-mode"), ("l2_transfer", 1e-3, 1.0)),
    "progress-compress": ("strength", 1e-4, 10.0),
}
# nothing holds their weights, or they do not move at all
WITHOUT = (
    "naive",
    "joint",
    "random-coreset",
    "kcenter-coreset",
    "progressive",
    "er",
    "derpp",
    "agem",
    "scommer",
    "dgr",
)
WITHOUT += ("generative-classifier",)
OTHERWISE = ("xdg", "progress-compress")  # without strength, they train a part of the units, or from other labels
# fromp: plain steps but for what holds the weights; evcl-paper: its own KL term alone would hold them
OWN = {"fromp": {"clip": 0.0}, "evcl-paper": {"tempering": 0.001, "init_std": 0.02}}


def task(number, head, device="cpu"):
    """Labels at random, so that gradients stay large."""
    source = generator(3, "task", number)
    x = torch.randn(1, EXAMPLES, INPUTS, generator=source)
    y = torch.randint(2, (1, EXAMPLES), generator=source)
    return TaskData(x.to(device), y.to(device), head, task=number)


def made(method, device="cpu", heads=(2, 2), **given):
    known = METHODS[method].known_settings
    usual = USUAL if method in OWN_STEPS else {**USUAL, "lr": LR, "lr_schedule": "constant"}
    usual = {**usual, **OWN.get(method, {})}
    chosen = {**{name: value for name, value in usual.items() if name in known}, **given}
    return run_of(method, evcl.nn.mlp(INPUTS, [HIDDEN]), chosen, heads=(HIDDEN, heads), device=device)


def second_task(method, device="cpu"):
    """The first layer's weights after one task and, for each way to learn a second one from there, after that: plainly,
    with the weak value, with the strong one and, if the method has point weights, with 0.
    """
    name, *values = STRENGTHS[method]
    first = made(method, device)
    first.learn([task(0, 0, device)])
    start = first.network.posterior
    plain = made("naive", device)
    plain.network.posterior = Gaussian(start.mean.clone(), None)
    plain.rounds, plain.seen = first.rounds, first.seen  # and so the same batches
    runs = {"plain": plain}
    for value in (*values, *([] if METHODS[method].bayesian else [0.0])):
        run = runs[value] = made(method, device, **{name: value})
        run.add_task_weights(1)  # with FiLM, the first task has a row
        run.load_tensors({key: t.clone() for key, t in first.tensors().items()}, first.outline(), 1, first.seen)
    for run in runs.values():
        run.learn([task(1, 1, device)])
    layout = first.network.layout
    ends = {key: layout.view(run.network.posterior.mean, "1.weight").double().cpu() for key, run in runs.items()}
    return layout.view(start.mean, "1.weight").double().cpu(), ends


def check_strength(method, device="cpu"):
    """The stronger, the nearer to where the first task ended; without strength, where plain training ends."""
    _, weak, strong = STRENGTHS[method]
    start, ends = second_task(method, device)
    moved = {key: float((end - start).norm()) for key, end in ends.items()}
    assert moved["plain"] > 2 * moved[strong], moved
    assert moved[weak] > 2 * moved[strong], moved
    assert float((ends[weak] - ends["plain"]).norm()) > 1e-3 * moved["plain"]
    if 0.0 in ends and method not in OTHERWISE and device == "cpu":
        torch.testing.assert_close(ends[0.0], ends["plain"], rtol=1e-3, atol=1e-3 * moved["plain"])
