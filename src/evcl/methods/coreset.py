"""Coresets: keep some examples of each task, and fine-tune on them for prediction. A wrapper around any method.

VCL with a coreset: q_t learns from the examples outside the coreset. Then, for prediction, a copy of q_t learns from
the coresets of all tasks so far, each through its own head, with q_t as the prior. The next task starts from q_t and
discards the copy. Every Bayesian method can use coresets (`coreset=kcenter`) with its own terms; for EVCL, q_t is also
the anchor, as if the coresets were one more task.

Coreset-only: after each task, a freshly initialised plain network learns from the coresets so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.randomness import Purpose
from evcl._core.settings import CORESET, Setting, Settings
from evcl.methods.composed import VCL
from evcl.methods.data import TaskData
from evcl.methods.distillation import of_inner
from evcl.methods.memory import examples, per_weight
from evcl.methods.method import Fit, Learned, Learning, Method, Round
from evcl.methods.parts import Part, without
from evcl.methods.selection import choose, others
from evcl.nn import Gaussian

STAGE = "coreset"
FINE_TUNED = Part(
    "coreset",
    "predicts with q~ = argmin NLL of the coreset + beta / N KL(q~ || q_t), the coreset left out of the task's rows",
    {"coreset": "none"},
)


def with_coreset(method: Method, **changes: Any) -> Method:
    """Add coresets to a method; its settings choose their kind and size."""
    memory = make_dataclass(
        "Memory",
        [
            ("inner", method.memory, field()),
            ("kept", tuple[TaskData, ...], examples()),
            ("tuned", Gaussian, per_weight(Gaussian, "posterior")),  # the fine-tuned copy, used for prediction
        ],
        frozen=True,
    )

    def learn(remembered: Any, round_: Round, s: Settings) -> Learning:
        rows = [_rows(remembered.kept, task, i, round_, s) for i, task in enumerate(round_.tasks)]
        rest = [task.select(others(r, task.y.shape[1])) for task, r in zip(round_.tasks, rows, strict=True)]
        s = Settings({**s, "one_softmax": True})  # kept examples of the old classes take part
        learned = yield from method.learn(remembered.inner, round_.of(rest), s)
        kept = (*remembered.kept, *(task.select(r) for task, r in zip(round_.tasks, rows, strict=True)))
        tuned = learned.posterior
        if _some(kept):
            one_more = method.learn(learned.memory, round_.of(kept, tuned), Settings({**s, "distill": 0.0}))
            fitted = yield replace(next(one_more), start=tuned, stage=STAGE, film=False)
            one_more.close()
            tuned = fitted.q
        return Learned(learned.posterior, memory(learned.memory, kept, tuned))

    wrapped = replace(method, memory=memory, learn=learn, predictor=_tuned, log_joint=None, stages=method.stages + 1)
    wrapped = replace(wrapped, structure=of_inner(method.structure))
    return replace(wrapped, **{"parts": [*without(method, "task inference"), FINE_TUNED], **changes})


def _rows(kept: Sequence[TaskData], task: TaskData, i: int, round_: Round, s: Settings) -> Tensor:
    """[R, m]: the rows of task i of the round that form its coreset."""
    shapes = [tuple(one.x.shape[2:]) for one in (*kept[:1], task)]
    if shapes[0] != shapes[-1]:
        raise EvclError(f"coresets need inputs of one shape, but {shapes[-1]} follows {shapes[0]}")
    if task.weights is not None:
        raise EvclError("class_weight, sample_weight: not with coresets, whose examples have no weights")
    count = len(round_.seeds)
    rows = choose(s.coreset, task.x, min(s.coreset_size, task.y.shape[1] // 2), round_.generators(Purpose.CORESET, i))
    return round_.same(rows[torch.arange(count) % len(rows)])


def _some(kept: Sequence[TaskData]) -> bool:
    """False if no examples are kept: a task with a single example has an empty coreset."""
    return any(task.y.numel() for task in kept)


def _tuned(memory: KeptAlone, posterior: Gaussian, task: int | None) -> Gaussian:
    return memory.tuned


@dataclass(frozen=True)
class KeptAlone:
    kept: tuple[TaskData, ...] = examples()
    tuned: Gaussian = per_weight(Gaussian, "posterior")


def _learn_kept(memory: KeptAlone, round_: Round, s: Settings) -> Learning:
    rows = [_rows(memory.kept, task, i, round_, s) for i, task in enumerate(round_.tasks)]
    kept = (*memory.kept, *(task.select(r) for task, r in zip(round_.tasks, rows, strict=True)))
    tuned = round_.posterior  # the initial weights: the posterior itself is never trained
    if _some(kept):
        tuned = (yield Fit(kept, stage=STAGE, number=-1 - round_.number)).q
    return Learned(round_.posterior, KeptAlone(kept, tuned))


def _fixed(kind: str) -> dict[str, Setting]:
    """The coreset settings of a method whose name fixes the kind of coreset."""
    return {**CORESET, "coreset": replace(CORESET["coreset"], default=kind, choices=(kind,))}


VCL_RANDOM_CORESET = with_coreset(
    VCL,
    name="vcl-random-coreset",
    summary="",
    settings={**VCL.settings, **_fixed("random")},
)
VCL_KCENTER_CORESET = with_coreset(
    VCL,
    name="vcl-kcenter-coreset",
    summary="",
    settings={**VCL.settings, **_fixed("kcenter")},
)
RANDOM_CORESET = Method(
    name="random-coreset",
    learn=_learn_kept,
    memory=KeptAlone,
    predictor=_tuned,
    settings=_fixed("random"),
)
KCENTER_CORESET = replace(
    RANDOM_CORESET,
    name="kcenter-coreset",
    summary="",
    settings=_fixed("kcenter"),
)
