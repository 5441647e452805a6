"""The paper's methods with coresets, some examples of each task that are kept.

VCL with a coreset: q_t learns from the examples outside it; then, for prediction, a copy of q_t learns from the
coresets of all tasks so far, each through its own head, with q_t as the prior. The copy is thrown away at the next
task, and q_t goes on. Every Bayesian method can do so (`coreset=kcenter`), with its own terms: for EVCL the anchor is
q_t too, as if the coresets were one task more.

Coreset-only: after each task a fresh plain network learns from the coresets so far.
"""

from __future__ import annotations

from dataclasses import replace

from evcl.methods.method import Method
from evcl.methods.vcl import VCL
from evcl.settings import CORESET, Setting


def _fixed(kind: str) -> dict[str, Setting]:
    """The settings of a method that is named after its coreset."""
    return {**CORESET, "coreset": replace(CORESET["coreset"], default=kind, choices=(kind,))}


VCL_RANDOM = replace(
    VCL,
    name="vcl-random-coreset",
    summary="VCL, tuned for prediction on random examples of every task",
    settings=_fixed("random"),
)
VCL_KCENTER = replace(
    VCL,
    name="vcl-kcenter-coreset",
    summary="VCL, tuned for prediction on the k-center examples of every task",
    settings=_fixed("kcenter"),
)
RANDOM = Method(
    name="random-coreset",
    summary="plain training on random examples of every task, afresh after each",
    bayesian=False,
    settings=_fixed("random"),
    coreset_only=True,
)
KCENTER = Method(
    name="kcenter-coreset",
    summary="plain training on the k-center examples of every task, afresh after each",
    bayesian=False,
    settings=_fixed("kcenter"),
    coreset_only=True,
)
