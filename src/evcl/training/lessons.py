"""Convert distillation losses to the form that a chain computes in its own pass: see `Lessons` in nn/lessons.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evcl.methods import Loss
from evcl.methods.method import Taught
from evcl.methods.together import LossOf
from evcl.nn.lessons import Lessons
from evcl.training.data import Pool


def all_heads(pool: Pool, losses: Sequence[Loss]) -> list[int]:
    """The heads of the data, followed by those that only losses use."""
    return list(dict.fromkeys([*pool.heads, *(k for loss in losses for k in loss.heads)]))


def find_lessons(
    losses: Sequence[Loss], pool: Pool, classes: Callable[[int], int], like: Tensor, most: int | None
) -> Lessons | None:
    """The lessons for weights like these [R, P]; None if there are other losses, or more than `most` columns.

    Methods that share a program may each distil for their own replicas, if the heads they distil beside those of the
    data are the same.
    """
    replicas, heads = len(like), all_heads(pool, losses)
    found: list[tuple[Taught, list[int]]] = []
    for loss in losses:
        own, rows = (loss.loss, loss.replicas.tolist()) if isinstance(loss, LossOf) else (loss, list(range(replicas)))
        taught = own.taught()
        if taught is None or {*pool.heads, *taught.heads} != set(heads):
            return None
        found.append((taught, rows))
    every = [r for _, rows in found for r in rows]
    once = all(len(set(one.heads)) == len(one.heads) for one, _ in found) and len(set(every)) == len(every)
    ends = dict(zip(heads, torch.tensor([classes(k) for k in heads]).cumsum(0).tolist(), strict=True))
    columns = ends[heads[-1]]
    if not found or not once or (most is not None and columns > most):
        return None
    distilled = list(dict.fromkeys(k for one, _ in found for k in one.heads))
    spans = [(ends[k] - classes(k), ends[k]) for k in distilled]
    u = replicas
    if len(losses) == 1 and len(every) == replicas and pool.own is None:
        lengths = {len(said) for said in found[0][0].said}
        u = max(lengths) if all(max(lengths) % n == 0 for n in lengths) else replicas
    q, told = (like.new_zeros(u, pool.y.shape[1], n) for n in (columns, len(distilled)))
    each = any(isinstance(w, Tensor) and w.numel() > len(w) for one, _ in found for w in one.strength)
    if each and most is not None:  # the kernels of a GPU have no strengths for each example
        return None
    temperature = like.new_ones(replicas)
    strengths = like.new_zeros(replicas, *([pool.y.shape[1]] if each else []), len(distilled))
    for one, rows in found:
        temperature[rows] = _each(one.temperature, like, len(rows))
        for head, said, strength in zip(one.heads, one.said, one.strength, strict=True):
            k = distilled.index(head)
            for i, r in enumerate(rows):
                places = slice(None) if pool.own is None else pool.own[r].to(like.device)
                weight = strength[i % len(strength)] if isinstance(strength, Tensor) else strength
                strengths[(r, places, k) if each else (r, k)] = weight
                if i < u:
                    log_q = said[i % len(said)]
                    q[r, places, slice(*spans[k])] = log_q.exp()
                    told[r, places, k] = (log_q.exp() * log_q).sum(1)
    value = like.new_zeros(replicas)
    return Lessons(q, told, torch.tensor(spans, device=like.device), temperature, strengths, pool.classes, value)


def _each(number: Tensor | float, like: Tensor, count: int) -> Tensor:
    """[count]"""
    return torch.as_tensor(number, dtype=like.dtype, device=like.device).reshape(-1).expand(count)
