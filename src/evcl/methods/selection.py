"""Which examples stand for a task: `random` ones, or `kcenter`, those that leave no other far away.

Greedy k-center (Gonzalez, 1985) in input space: the first centre is the example nearest the mean, each next one the
example farthest from the centres so far; the lower index where two are equally far. Distances are computed from
differences and not as |x|^2 - 2 x.c + |c|^2, one matrix product, which is not 0 between copies of an example, so that
rounding would decide between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FIRST_BLOCK, LARGEST_BLOCK = 8, 2048  # examples measured at once


def choose(kind: str, x: Tensor, count: int, generators: Sequence[torch.Generator]) -> Tensor:
    """`random`: rows [R, count] for R generators; `kcenter`: [U, count], those of each of x [U, N, ...]."""
    if kind == "random":
        rows = torch.stack([torch.randperm(x.shape[1], generator=g)[:count] for g in generators])
        return rows.to(x.device)
    return kcenter(x.flatten(2), count)


def others(rows: Tensor, n: int) -> Tensor:
    """[R, n - count]: those of n rows that are not among `rows` [R, count], in order."""
    taken = torch.zeros(len(rows), n, dtype=torch.uint8, device=rows.device).scatter_(1, rows, 1)
    return taken.argsort(dim=1, stable=True)[:, : n - rows.shape[1]]


@torch.no_grad()
def kcenter(x: Tensor, count: int) -> Tensor:
    """The rows [R, count] of the k-centers of x [R, N, D]; count is at most N."""
    if x.is_cuda:  # measuring costs less than waiting for the answer
        return _eager(x, count)
    return torch.stack([_lazy(one, count) for one in x])


def _eager(x: Tensor, count: int) -> Tensor:
    """Every example is measured against every centre; nothing waits for the device."""
    chosen = _distance(x, x.mean(1, keepdim=True)).squeeze(2).argmin(1, keepdim=True)
    near = x.new_full(x.shape[:2], torch.inf)
    rows = []
    for _ in range(count):
        rows.append(chosen)
        centre = x.gather(1, chosen.unsqueeze(2).expand(-1, -1, x.shape[2]))
        torch.minimum(near, _distance(x, centre).squeeze(2), out=near)
        near.scatter_(1, chosen, -1.0)  # once chosen, never again
        chosen = near.argmax(1, keepdim=True)
    return torch.cat(rows, 1) if rows else chosen[:, :0]


def _lazy(x: Tensor, count: int) -> Tensor:
    """The same for x [N, D]: [count].

    Each centre can only bring an example nearer, so that an old distance is a bound of the present one, and an example
    is measured again only while its bound is not below the farthest that is known: a fraction of them at each centre.
    """
    rows = torch.zeros(count, dtype=torch.long)
    centres = x.new_empty(count, x.shape[1])
    near = x.new_full((len(x),), torch.inf)  # the distance to the nearest of the first `seen` centres
    seen = torch.zeros(len(x), dtype=torch.long)
    for k in range(count):
        if k == 0:
            row = _distance(x, x.mean(0, keepdim=True)).squeeze(1).argmin()
        else:
            _measure(x, centres[:k], near, seen)
            row = near.argmax()
        rows[k], centres[k], near[row] = row, x[row], -1.0  # once chosen, never again
    return rows


def _measure(x: Tensor, centres: Tensor, near: Tensor, seen: Tensor) -> None:
    """Bring `near` up to date with the centres for every example that could be the farthest from them."""
    k = len(centres)
    old = (seen < k) & (near > 0)
    farthest = near.masked_fill(old, -1.0).max()
    block = FIRST_BLOCK
    while len(rows := (old & (near >= farthest)).nonzero().squeeze(1)):
        if len(rows) > block:
            rows = rows[near[rows].topk(block, sorted=False).indices]
        now = torch.minimum(near[rows], _distance(x[rows], centres[int(seen[rows].min()) :]).amin(1))
        near[rows], seen[rows], old[rows] = now, k, False
        farthest = torch.maximum(farthest, now.max())
        block = min(2 * block, LARGEST_BLOCK)


def _distance(x: Tensor, centres: Tensor) -> Tensor:
    """[..., N, K]: Euclidean distances of x [..., N, D] to centres [..., K, D], each pair in the same way."""
    return torch.cdist(x, centres, compute_mode="donot_use_mm_for_euclid_dist")
