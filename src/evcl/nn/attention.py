"""Bayesian attention: the projections are Bayesian linear layers; the attention itself has no weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evcl._core.errors import EvclError
from evcl.nn.layers import Dropout, Linear
from evcl.nn.sampled import Composite


class Attention(nn.Module):
    """The forward pass of nn.MultiheadAttention, with batch_first or not, and masks. Subclasses have the weights."""

    # torch's TransformerEncoderLayer checks these, and then does not use the fast path, which would bypass this layer.
    in_proj_bias = None
    _qkv_same_embed_dim = False
    batch_first: bool
    num_heads: int

    def __init__(self) -> None:
        super().__init__()
        self.dropout: Dropout | None = None  # of the attention weights

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """The projections of all three, for inputs whose first axis is the batch."""
        raise NotImplementedError

    def combine(self, y: Tensor) -> Tensor:
        """The layer's output from what its heads have read."""
        raise NotImplementedError

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.dim() != 3:
            raise EvclError(f"MultiheadAttention takes a batch of sequences (3 axes), not shape {tuple(query.shape)}")
        if query is key and key is value:
            query = key = value = query if self.batch_first else query.transpose(0, 1)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        parts = self.project(query, key, value)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in parts)  # [R*B, heads, t, d]
        mask = _mask(q, k, attn_mask, key_padding_mask, is_causal)
        weights: Tensor | None = None
        drops = self.dropout is not None and self.dropout.p > 0 and self.dropout.weights.noise is not None
        if need_weights or drops:
            scores = q @ k.mT * q.shape[-1] ** -0.5
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = weights if self.dropout is None else self.dropout(weights)
            y = weights @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask)
        out = self.combine(y.transpose(1, 2).flatten(2))
        out = out if self.batch_first else out.transpose(0, 1)
        if not need_weights or weights is None:
            return out, None
        return out, weights.mean(1) if average_attn_weights else weights


class MultiheadAttention(Attention, Composite):
    """The Bayesian form of nn.MultiheadAttention, also with kdim and vdim.

    If query, key and value are the same tensor, one matrix product computes all three projections; otherwise each uses
    its rows of the same weights.
    """

    def __init__(self, layer: nn.MultiheadAttention) -> None:
        super().__init__()
        self.batch_first, self.num_heads = layer.batch_first, layer.num_heads
        width, packed = layer.embed_dim, layer.in_proj_weight
        projections = [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
        self.packed = None if packed is None else _projection(packed, layer.in_proj_bias)
        if self.packed is not None:
            self.packed.pieces = 3
        self.projections = nn.ModuleList(
            _projection(weight if packed is None else packed, layer.in_proj_bias, slice(k * width, (k + 1) * width))
            for k, weight in enumerate(projections)
        )
        self.out_proj = Linear(layer.out_proj)
        self.dropout = Dropout(nn.Dropout(layer.dropout))

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        if query is key and key is value and self.packed is not None:
            return list(self.packed(query).chunk(3, -1))
        return [f(x) for f, x in zip(self.projections, (query, key, value), strict=True)]

    def combine(self, y: Tensor) -> Tensor:
        out: Tensor = self.out_proj(y)
        return out


def more_keys(layer: nn.Module) -> bool:
    """Whether it is attention with keys that are no projections, which its Bayesian form does not have."""
    return isinstance(layer, nn.MultiheadAttention) and (layer.bias_k is not None or layer.add_zero_attn)


def _projection(weight: Tensor, bias: Tensor | None, rows: slice | None = None) -> Linear:
    """A linear layer with these parameters; with `rows`, it uses those rows of a packed parameter (3 times as long)."""
    layer = Linear(nn.Identity())
    layer.own = {key: p for key, p in (("weight", weight), ("bias", bias)) if isinstance(p, nn.Parameter)}
    if rows is not None:
        layer.rows = {key: rows for key, p in layer.own.items() if len(p) == 3 * (rows.stop - rows.start)}
    return layer


def _mask(q: Tensor, k: Tensor, attn: Tensor | None, padding: Tensor | None, causal: bool) -> Tensor | None:
    """What to add to the scores, broadcastable to [R*B, heads, t, s]; None if there is no mask."""
    if attn is None and causal:
        attn = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    added = None if attn is None else _additive(attn, q)
    if added is not None and added.dim() == 3:  # one mask per example and head
        added = added.unflatten(0, q.shape[:2])
    if padding is None:
        return added
    ignored = _additive(padding, q)[:, None, None]
    return ignored if added is None else added + ignored


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """Turn a boolean mask, True for positions to ignore, into one that is added: 0 or -inf."""
    if mask.dtype != torch.bool:
        return mask.to(like)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)
