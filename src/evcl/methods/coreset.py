"""Coresets: some examples of each task are kept, and what predicts is tuned on them. A wrapper around any method.

VCL with a coreset: q_t learns from the examples outside it; then, for prediction, a copy of q_t learns from the
coresets of all tasks so far, each through its own head, with q_t as the prior. The copy is thrown away at the next
task, and q_t goes on. Every Bayesian method can do so (`coreset=kcenter`), with its own terms: for EVCL the anchor is
q_t too, as if the coresets were one task more.

Coreset-only: after each task a fresh plain network learns from the coresets so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.settings import CORESET, Setting, Settings
from evcl._core.summaries import METHOD_SUMMARIES
from evcl.methods.data import TaskData
from evcl.methods.memory import examples, per_weight
from evcl.methods.method import Fit, Learned, Learning, Method, Round
from evcl.methods.selection import choose, others
from evcl.methods.vcl import VCL
from evcl.nn import Gaussian

STAGE = "coreset"


def with_coreset(method: Method, **changes: Any) -> Method:
    """The method with coresets, of the kind and size that its settings say."""
    memory = make_dataclass(
        "Memory",
        [
            ("inner", method.memory, field()),
            ("kept", tuple[TaskData, ...], examples()),
            ("tuned", Gaussian, per_weight(Gaussian, "posterior")),  # the copy that predicts
        ],
        frozen=True,
    )

    def learn(remembered: Any, round_: Round, s: Settings) -> Learning:
        rows = [_rows(remembered.kept, task, i, round_, s) for i, task in enumerate(round_.tasks)]
        rest = [task.select(others(r, task.y.shape[1])) for task, r in zip(round_.tasks, rows, strict=True)]
        learned = yield from method.learn(remembered.inner, round_.of(rest), s)
        kept = (*remembered.kept, *(task.select(r) for task, r in zip(round_.tasks, rows, strict=True)))
        tuned = learned.posterior
        if _some(kept):
            one_more = method.learn(learned.memory, round_.of(kept, tuned), Settings({**s, "distill": 0.0}))
            fitted = yield replace(next(one_more), start=tuned, stage=STAGE)
            one_more.close()
            tuned = fitted.q
        return Learned(learned.posterior, memory(learned.memory, kept, tuned))

    wrapped = replace(method, memory=memory, learn=learn, predictor=_tuned, stages=method.stages + 1)
    return replace(wrapped, shares=f"{method.shares} and coresets", **changes)


def for_settings(method: Method, s: Settings) -> Method:
    """The method as its settings want it: with coresets, where it can do without and they ask for some."""
    chosen = s.get("coreset", "none") != "none" and "none" in method.known_settings["coreset"].choices
    return with_coreset(method) if chosen else method


def _rows(kept: Sequence[TaskData], task: TaskData, i: int, round_: Round, s: Settings) -> Tensor:
    """The rows [R, m] of the coreset of the round's task i."""
    shapes = [tuple(one.x.shape[2:]) for one in (*kept[:1], task)]
    if shapes[0] != shapes[-1]:
        raise EvclError(f"coresets need inputs of one shape, and {shapes[-1]} came after {shapes[0]}")
    if task.weights is not None:
        raise EvclError("class_weight and coresets do not go together: an example that is kept has no weight")
    count = len(round_.seeds)
    found = choose(s.coreset, task.x, min(s.coreset_size, task.y.shape[1] // 2), round_.generators("coreset", i))
    return round_.same(found[torch.arange(count) % len(found)])


def _some(kept: Sequence[TaskData]) -> bool:
    """Tasks of one example each have none to keep."""
    return any(task.y.numel() for task in kept)


def _tuned(memory: Any, posterior: Gaussian, task: int | None) -> Gaussian:
    tuned: Gaussian = memory.tuned
    return tuned


@dataclass(frozen=True)
class KeptAlone:
    kept: tuple[TaskData, ...] = examples()
    tuned: Gaussian = per_weight(Gaussian, "posterior")


def _learn_kept(memory: KeptAlone, round_: Round, s: Settings) -> Learning:
    rows = [_rows(memory.kept, task, i, round_, s) for i, task in enumerate(round_.tasks)]
    kept = (*memory.kept, *(task.select(r) for task, r in zip(round_.tasks, rows, strict=True)))
    tuned = round_.posterior  # which never learns: the first weights
    if _some(kept):
        tuned = (yield Fit(kept, stage=STAGE, number=-1 - round_.number)).q
    return Learned(round_.posterior, KeptAlone(kept, tuned))


def _fixed(kind: str) -> dict[str, Setting]:
    """The settings of a method that is named after its coreset."""
    return {**CORESET, "coreset": replace(CORESET["coreset"], default=kind, choices=(kind,))}


VCL_RANDOM = with_coreset(
    VCL,
    name="vcl-random-coreset",
    summary=METHOD_SUMMARIES["vcl-random-coreset"],
    settings={**VCL.settings, **_fixed("random")},
)
VCL_KCENTER = with_coreset(
    VCL,
    name="vcl-kcenter-coreset",
    summary=METHOD_SUMMARIES["vcl-kcenter-coreset"],
    settings={**VCL.settings, **_fixed("kcenter")},
)
RANDOM = Method(
    name="random-coreset",
    summary=METHOD_SUMMARIES["random-coreset"],
    bayesian=False,
    learn=_learn_kept,
    memory=KeptAlone,
    predictor=_tuned,
    settings=_fixed("random"),
    shares="coresets",
)
KCENTER = replace(
    RANDOM,
    name="kcenter-coreset",
    summary=METHOD_SUMMARIES["kcenter-coreset"],
    settings=_fixed("kcenter"),
)
