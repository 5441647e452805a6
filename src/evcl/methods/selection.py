"""Select the examples that represent a task: at `random`, or by `kcenter`, so that every example is near a selected
one.

Greedy k-center (Gonzalez, 1985) in input space: the first centre is the example nearest the mean, and each next centre
is the example farthest from the centres so far; ties go to the lower index. Distances are computed from differences.
The faster form |x|^2 - 2 x.c + |c|^2, one matrix product, is not exactly 0 between copies of an example, so rounding
would decide between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FIRST_BLOCK, LARGEST_BLOCK = 8, 2048  # examples whose distances are computed at once


def choose(kind: str, x: Tensor, count: int, generators: Sequence[torch.Generator]) -> Tensor:
    """Select `count` rows: `random` returns [R, count] for R generators, `kcenter` [U, count] for x [U, N, ...]."""
    if kind == "random":
        rows = torch.stack([torch.randperm(x.shape[1], generator=g)[:count] for g in generators])
        return rows.to(x.device)
    return kcenter(x.flatten(2), count)


def others(rows: Tensor, n: int) -> Tensor:
    """[R, n - count]: the rows out of n that are not in `rows` [R, count], in ascending order."""
    taken = torch.zeros(len(rows), n, dtype=torch.uint8, device=rows.device).scatter_(1, rows, 1)
    return taken.argsort(dim=1, stable=True)[:, : n - rows.shape[1]]


@torch.no_grad()
def kcenter(x: Tensor, count: int) -> Tensor:
    """[R, count]: the rows of the k-centers of x [R, N, D]; count must be at most N."""
    if x.is_cuda:  # computing all distances costs less than synchronising with the device
        return eager(x, count)
    return torch.stack([lazy(one, count) for one in x.cpu()]).to(x.device)


def eager(x: Tensor, count: int) -> Tensor:
    """Compute the distance of every example to every centre, without synchronising with the device."""
    chosen = distances(x, x.mean(1, keepdim=True)).squeeze(2).argmin(1, keepdim=True)
    near = x.new_full(x.shape[:2], torch.inf)
    rows = []
    for _ in range(count):
        rows.append(chosen)
        centre = x.gather(1, chosen.unsqueeze(2).expand(-1, -1, x.shape[2]))
        torch.minimum(near, distances(x, centre).squeeze(2), out=near)
        near.scatter_(1, chosen, -1.0)  # never choose it again
        chosen = near.argmax(1, keepdim=True)
    return torch.cat(rows, 1) if rows else chosen[:, :0]


def lazy(x: Tensor, count: int) -> Tensor:
    """[count]: the same for x [N, D].

    A new centre can only reduce an example's distance to its nearest centre, so an old distance is an upper bound of
    the present one. A distance is recomputed only while its bound is not below the largest known distance: for a
    fraction of the examples per centre.
    """
    rows = torch.zeros(count, dtype=torch.long)
    centres = x.new_empty(count, x.shape[1])
    near = x.new_full((len(x),), torch.inf)  # the distance to the nearest of the first `seen` centres
    seen = torch.zeros(len(x), dtype=torch.long)
    for k in range(count):
        if k == 0:
            row = distances(x, x.mean(0, keepdim=True)).squeeze(1).argmin()
        else:
            _measure(x, centres[:k], near, seen)
            row = near.argmax()
        rows[k], centres[k], near[row] = row, x[row], -1.0  # never choose it again
    return rows


def _measure(x: Tensor, centres: Tensor, near: Tensor, seen: Tensor) -> None:
    """Update `near` for every example that could be the farthest from the centres."""
    k = len(centres)
    old = (seen < k) & (near > 0)
    farthest = near.masked_fill(old, -1.0).max()
    block = FIRST_BLOCK
    while len(rows := (old & (near >= farthest)).nonzero().squeeze(1)):
        if len(rows) > block:
            rows = rows[near[rows].topk(block, sorted=False).indices]
        now = torch.minimum(near[rows], distances(x[rows], centres[int(seen[rows].min()) :]).amin(1))
        near[rows], seen[rows], old[rows] = now, k, False
        farthest = torch.maximum(farthest, now.max())
        block = min(2 * block, LARGEST_BLOCK)


def distances(x: Tensor, centres: Tensor) -> Tensor:
    """[..., N, K]: Euclidean distances from x [..., N, D] to centres [..., K, D], each computed from differences."""
    return torch.cdist(x, centres, compute_mode="donot_use_mm_for_euclid_dist")
