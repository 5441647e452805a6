"""Convert distillation losses to the form that a chain computes in its own pass: see `Lessons` in nn/chain.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evcl.methods import Loss
from evcl.nn.chain import Lessons
from evcl.training.data import Pool


def all_heads(pool: Pool, losses: Sequence[Loss]) -> list[int]:
    """The heads of the data, followed by those that only losses use."""
    return list(dict.fromkeys([*pool.heads, *(k for loss in losses for k in loss.heads)]))


def find_lessons(
    losses: Sequence[Loss], pool: Pool, classes: Callable[[int], int], like: Tensor, most: int | None
) -> Lessons | None:
    """The lessons for weights like these [R, P]; None if there are other losses, or more than `most` columns."""
    replicas, heads = len(like), all_heads(pool, losses)
    taught = losses[0].taught() if len(losses) == 1 else None
    if taught is None or len(set(taught.heads)) < len(taught.heads):
        return None
    ends = dict(zip(heads, torch.tensor([classes(k) for k in heads]).cumsum(0).tolist(), strict=True))
    columns = ends[heads[-1]]
    if most is not None and columns > most:
        return None
    spans = [(ends[k] - classes(k), ends[k]) for k in taught.heads]
    u = replicas
    if pool.own is None:
        lengths = {len(said) for said in taught.said}
        u = max(lengths) if all(max(lengths) % n == 0 for n in lengths) else replicas
    q, told = (like.new_zeros(u, pool.y.shape[1], n) for n in (columns, len(taught.heads)))
    each = any(isinstance(w, Tensor) and w.numel() > len(w) for w in taught.strength)
    if each and most is not None:  # the kernels of a GPU have no strengths for each example
        return None
    temperature = like.new_empty(replicas).copy_(torch.as_tensor(taught.temperature).reshape(-1))
    strengths = like.new_zeros(replicas, *([pool.y.shape[1]] if each else []), len(taught.heads))
    for k, (said, strength) in enumerate(zip(taught.said, taught.strength, strict=True)):
        for r in range(replicas):
            places = slice(None) if pool.own is None else pool.own[r].to(like.device)
            weight = strength[r % len(strength)] if isinstance(strength, Tensor) else strength
            strengths[(r, places, k) if each else (r, k)] = weight
            if r < u:
                log_q = said[r % len(said)]
                q[r, places, slice(*spans[k])] = log_q.exp()
                told[r, places, k] = (log_q.exp() * log_q).sum(1)
    value = like.new_zeros(replicas)
    return Lessons(q, told, torch.tensor(spans, device=like.device), temperature, strengths, pool.classes, value)
